"""Locks with contenders, with holders that die or freeze, and the fence that makes them safe."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, LeaseLost, Lock, Session, put_op, value_is


def test_contenders_exclude_each_other(etcd: Etcd, etcd_server: EmbeddedEtcd, prefix: str) -> None:
    rounds, workers = 8, 4
    inside: list[int] = []
    most: list[int] = []
    errors: list[BaseException] = []
    etcd.put(prefix + "sum", b"0")

    def work(worker: int) -> None:
        try:
            with Etcd(etcd_server.endpoints, deadline=60) as own, Session(own, 60).run_thread() as session:
                for _ in range(rounds):
                    with Lock(session, prefix + "lock") as lock:
                        inside.append(worker)
                        most.append(len(inside))
                        kv = own.get(prefix + "sum")
                        assert kv is not None
                        put = put_op(prefix + "sum", b"%d" % (int(kv.value) + 1))
                        assert own.txn([lock.fence(), value_is(prefix + "sum", kv.value)], [put]).ok
                        inside.remove(worker)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert max(most) == 1
    kv = etcd.get(prefix + "sum")
    assert kv is not None
    assert kv.value == b"%d" % (rounds * workers)
    assert etcd.count(prefix + "lock/") == 0


def test_a_waiter_whose_lease_ends_says_so(etcd: Etcd, prefix: str) -> None:
    with Session(etcd, 120) as one, Session(etcd, 1) as two:
        Lock(one, prefix + "lock").acquire()
        with pytest.raises(LeaseLost):
            Lock(two, prefix + "lock").acquire(timeout=10)
        with Session(etcd, 10).run_thread() as three:
            etcd.lease_revoke(three.lease)
            with pytest.raises(LeaseLost):
                Lock(three, prefix + "lock").acquire(timeout=10)


HOLDER = """
import sys
from graphft.runtime.etcd import Etcd, LeaseLost, Lock, Session, put_op
prefix, ttl, *endpoints = sys.argv[1:]
etcd, lock = Etcd(endpoints, timeout=20, deadline=60), None
while lock is None or not lock.held:  # on a busy machine, the lease may end before
    try:
        lock = Lock(Session(etcd, int(ttl)).run_thread(), prefix + "lock")
        lock.acquire()
    except LeaseLost:
        pass
print("holds", flush=True)
sys.stdin.readline()
print(lock.held, etcd.txn([lock.fence()], [put_op(prefix + "data", b"stale")]).ok, flush=True)
"""


@pytest.fixture
def other(etcd_server: EmbeddedEtcd, prefix: str, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock, and writes under its fence when a line comes."""
    command = [sys.executable, "-c", HOLDER, prefix, str(request.param), *etcd_server.endpoints]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("other", [4], indirect=True)
def test_a_frozen_holder_that_wakes_writes_nothing(etcd: Etcd, prefix: str, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGSTOP)
    with Session(etcd, 120).run_thread() as session:
        lock = Lock(session, prefix + "lock")
        assert lock.acquire(timeout=120)
        other.send_signal(signal.SIGCONT)
        said, _ = other.communicate("write\n", timeout=120)
        assert said == "False False\n"
        assert etcd.get(prefix + "data") is None
        assert etcd.txn([lock.fence()], [put_op(prefix + "data", b"good")]).ok
