"""A cluster of three: what goes on when its leader is killed or frozen, and when the majority is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError, Session, Watch, absent, put_op
from tests.support.etcd_servers import EmbeddedCluster
from tests.support.waiting import until


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster") / "members") as cluster:
        yield cluster


def leader_of(cluster: EmbeddedCluster) -> EmbeddedEtcd:
    """Waits for it: an election may be under way."""
    found: list[EmbeddedEtcd] = []

    def seen() -> bool:
        with contextlib.suppress(EtcdError):
            found.append(cluster.leader())
        return bool(found)

    until(seen)
    return found[0]


def test_work_goes_on_when_the_leader_is_killed(cluster: EmbeddedCluster) -> None:
    seen: list[str] = []
    with (
        Etcd(cluster.endpoints, deadline=120) as etcd,
        Session(etcd, 60).run_thread() as session,
        Watch(etcd, "/w/", lambda events: seen.extend(e.kv.key for e in events)) as watch,
    ):
        etcd.put("/mine", b"", session.lease)
        expected = []
        for cycle in range(2):
            leader = leader_of(cluster)
            leader.kill()
            started = time.monotonic()
            for i in range(10):
                key = f"/w/{cycle}-{i}"
                assert etcd.txn([absent(key)], [put_op(key, b"me")], token=key).ok
                expected.append(key)
            assert time.monotonic() - started < 120
            assert watch.wait(lambda view: len(view) == len(expected), 120)
            leader.start()
        session.check()
        kv = etcd.get("/mine")
        assert kv is not None
        assert kv.lease == session.lease
    assert seen == expected
