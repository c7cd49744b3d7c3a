"""What an earlier run has left in etcd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec

from graphft.runtime.earlier_run import forget_earlier, revoke_dead
from graphft.runtime.etcd import Etcd
from graphft.runtime.keys import Keys
from graphft.runtime.view import Registration


def test_leases_end_of_processes_that_are_no_more_and_ran_here(etcd: Etcd, keys: Keys) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    for name, pid, host in (("dead", gone.pid, here), ("alive", os.getpid(), here), ("elsewhere", gone.pid, "far")):
        etcd.put(keys.trainer(name), msgspec.json.encode(Registration(name, "", pid, host)), etcd.lease_grant(60)[0])
    etcd.put(keys.pserver(0), msgspec.json.encode(Registration("0", "", gone.pid, here)), etcd.lease_grant(60)[0])
    revoke_dead(etcd, keys)
    assert {kv.key for kv in etcd.range(keys.control).kvs} == {keys.trainer("alive"), keys.trainer("elsewhere")}


def leave(etcd: Etcd, keys: Keys, state: bytes) -> None:
    for key in (keys.spec, f"{keys.queue(0)}failed/000001", f"{keys.events}1"):
        etcd.put(key, b"{}")
    etcd.put(keys.state, state)


def everything(etcd: Etcd, keys: Keys) -> int:
    return sum(etcd.count(prefix) for prefix in keys.everything)


def test_a_run_that_is_over_is_forgotten_whole(etcd: Etcd, keys: Keys, tmp_path: Path) -> None:
    etcd.put(f"/{keys.job}-2/spec", b"another job's")
    leave(etcd, keys, b"running")
    forget_earlier(etcd, keys, tmp_path, ft=True)
    assert everything(etcd, keys) == 4, "it can be gone on with"
    forget_earlier(etcd, keys, tmp_path, ft=False)
    assert everything(etcd, keys) == 0
    leave(etcd, keys, b"complete")
    forget_earlier(etcd, keys, tmp_path, ft=True)
    assert everything(etcd, keys) == 0
    assert etcd.count(f"/{keys.job}-2/") == 1


class Overtaken:
    """A store in which somebody else begins the job anew before the next transaction."""

    def __init__(self, etcd: Etcd, keys: Keys) -> None:
        self.etcd, self.keys, self.range = etcd, keys, etcd.range

    def txn(self, *args: Any, **kwargs: Any) -> Any:
        leave(self.etcd, self.keys, b"running")
        return self.etcd.txn(*args, **kwargs)


def test_what_began_meanwhile_is_not_forgotten(etcd: Etcd, keys: Keys, tmp_path: Path) -> None:
    leave(etcd, keys, b"complete")
    forget_earlier(cast("Etcd", Overtaken(etcd, keys)), keys, tmp_path, ft=True)
    assert everything(etcd, keys) == 4
