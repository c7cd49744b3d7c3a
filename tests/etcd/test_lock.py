"""Locks with contenders, with holders that die or freeze, and the fence that makes them safe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from etcd.servers import value

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, LeaseLost, Lock, Session, put_op, value_is
from tests.sim.etcd_store import SimEtcd


def test_contenders_exclude_each_other(etcd: Etcd, etcd_server: EmbeddedEtcd, prefix: str) -> None:
    rounds, workers = 8, 4
    inside: list[int] = []
    most: list[int] = []
    etcd.put(prefix + "sum", b"0")

    def work(worker: int) -> None:
        with Etcd(etcd_server.endpoints, deadline=60) as own, Session(own, 60).run_thread() as session:
            for _ in range(rounds):
                lock = Lock(session, prefix + "lock")
                lock.acquire()
                inside.append(worker)
                most.append(len(inside))
                before = value(own, prefix + "sum") or b""
                put = put_op(prefix + "sum", b"%d" % (int(before) + 1))
                assert own.txn([lock.fence(), value_is(prefix + "sum", before)], [put]).ok
                inside.remove(worker)
                lock.release()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    assert max(most) == 1
    assert value(etcd, prefix + "sum") == b"%d" % (rounds * workers)
    assert etcd.count(prefix + "lock/") == 0


def test_a_waiter_whose_lease_ends_says_so(etcd: Etcd, prefix: str) -> None:
    with Session(etcd, 120) as one, Session(etcd, 1) as two:
        Lock(one, prefix + "lock").acquire()
        with pytest.raises(LeaseLost):
            Lock(two, prefix + "lock").acquire()
        with Session(etcd, 10).run_thread() as three:
            etcd.lease_revoke(three.lease)
            with pytest.raises(LeaseLost):
                Lock(three, prefix + "lock").acquire()


def test_a_holder_that_was_frozen_writes_nothing() -> None:
    now = [0.0]
    etcd = SimEtcd(lambda: now[0])
    locks = [Lock(Session(etcd, ttl, clock=lambda: now[0]), "/lock") for ttl in (4, 120)]
    locks[0].acquire()
    now[0] += 5
    locks[1].acquire()
    assert not etcd.txn([locks[0].fence()], [put_op("/data", b"stale")]).ok
    assert etcd.txn([locks[1].fence()], [put_op("/data", b"good")]).ok
