"""What an earlier run has left in etcd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from graphft.runtime.etcd import Etcd
from graphft.runtime.keys import Keys
from graphft.runtime.own_etcd import revoke_dead
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
