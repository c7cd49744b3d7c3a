"""Etcd refuses for good, which is said at once, or for a while: then it is tried again."""

from __future__ import annotations

from pathlib import Path

import pytest
from etcd.servers import cure, fill, full_etcd

from graphft.runtime.etcd import Etcd, EtcdError, EtcdFull, TransientEtcdError, Watch, absent, channel, put_op


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An etcd that does not answer at once is asked for its alarms all the same."""
    monkeypatch.setattr(channel, "ALARM_SECONDS", 60.0)


@pytest.mark.parametrize("size", [1_700_000, 3_000_000])
def test_a_request_that_is_too_large_is_refused_for_good(etcd: Etcd, prefix: str, size: int) -> None:
    for call in (
        lambda: etcd.put(prefix + "a", bytes(size)),
        lambda: etcd.txn([absent(prefix + "a")], [put_op(prefix + "a", bytes(size))], token=prefix + "a"),
    ):
        with pytest.raises(EtcdError) as caught:
            call()
        assert not isinstance(caught.value, TransientEtcdError)
        assert f"{prefix}a ({str(size)[:3]}" in caught.value.message, "it says what was refused, and how large it is"


def test_a_full_etcd_is_waited_for(tmp_path: Path) -> None:
    with full_etcd(tmp_path) as server, Etcd(server.endpoints, deadline=60) as etcd, Watch(etcd, "/w/") as watch:
        lease, ttl = etcd.lease_grant(120)
        etcd.put("/w/before", b"1", lease)
        assert not etcd.is_full()
        fill(etcd)
        assert etcd.is_full()
        with pytest.raises(EtcdFull) as caught:
            etcd.txn([absent("/w/a")], [put_op("/w/a", b"1")], token="/w/a")
        assert "quota" in caught.value.help
        assert "/w/a" in caught.value.message
        with pytest.raises(EtcdFull):
            etcd.lease_grant(10)
        assert etcd.lease_keepalive_once(lease) == ttl, "nobody loses its lease"
        assert etcd.get("/w/a") is None, "what was refused was not done"
        cure(etcd)
        assert not etcd.is_full()
        assert etcd.txn([absent("/w/a")], [put_op("/w/a", b"1")], token="/w/a").ok
        assert watch.wait(lambda view: set(view) == {"/w/before", "/w/a"}, 60)
