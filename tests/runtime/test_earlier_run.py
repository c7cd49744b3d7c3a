"""What an earlier run has left in etcd."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from graphft.runtime.earlier_run import forget_earlier, revoke_dead
from graphft.runtime.etcd import Etcd
from graphft.runtime.identity import UNKNOWN, Identity, identify
from graphft.runtime.keys import Keys
from graphft.runtime.view import Registration


def test_leases_end_of_processes_that_are_no_more_and_ran_here(etcd: Etcd, keys: Keys) -> None:
    gone, elsewhere = ended(), replace(ended(), machine="another")
    for name, process in (("dead", gone), ("alive", identify()), ("elsewhere", elsewhere), ("unknown", UNKNOWN)):
        register(etcd, keys.trainer(name), process)
    register(etcd, keys.pserver(0), gone)
    revoke_dead(etcd, keys)
    left = {kv.key for kv in etcd.range(keys.control).kvs}
    assert left == {keys.trainer("alive"), keys.trainer("elsewhere"), keys.trainer("unknown")}


def ended() -> Identity:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(process.pid)
    process.communicate(b"\n")
    return identity


def register(etcd: Etcd, key: str, process: Identity) -> None:
    record = Registration(key, "", process.pid, socket.gethostname(), process=process)
    etcd.put(key, msgspec.json.encode(record), etcd.lease_grant(60)[0])


CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
"""A PID namespace of its own, on the same host."""


def allowed() -> bool:
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not allowed(), reason="PID namespaces are not allowed here")
def test_a_launcher_in_another_pid_namespace_revokes_nobodys_lease(etcd: Etcd, keys: Keys) -> None:
    """Pitfall 37: it has the same host name, and sees none of these processes. Nor do we see those of its."""
    register(etcd, keys.trainer("outside"), identify())
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.runtime.test_earlier_run import Etcd, Keys, identify, register, revoke_dead
etcd, keys = Etcd([{etcd.endpoints[0]!r}]), Keys({keys.job!r})
revoke_dead(etcd, keys)
register(etcd, keys.trainer("inside"), identify())
"""
    subprocess.run([*CONTAINER, sys.executable, "-c", script], check=True, timeout=60)
    revoke_dead(etcd, keys)
    assert {kv.key for kv in etcd.range(keys.control).kvs} == {keys.trainer("outside"), keys.trainer("inside")}


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
