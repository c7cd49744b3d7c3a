"""What etcd refuses: for good, and then it is said at once; or for a while, and then it is tried again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from etcd.full import cure, defragment, fill, full_etcd, with_options
from etcd.logins import enable_login

from graphft.runtime.etcd import (
    EmbeddedEtcd,
    Etcd,
    EtcdError,
    EtcdFull,
    TransientEtcdError,
    Watch,
    absent,
    channel,
    put_op,
)
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An etcd that does not answer at once is asked for its alarms all the same."""
    monkeypatch.setattr(channel, "ALARM_SECONDS", 60.0)


@pytest.mark.parametrize("size", [1_700_000, 3_000_000])
def test_a_request_that_is_too_large_is_refused_for_good(etcd: Etcd, prefix: str, size: int) -> None:
    """Etcd itself refuses the first, its gRPC the second, with the status that means a full etcd, too."""
    for call in (
        lambda: etcd.put(prefix + "a", bytes(size)),
        lambda: etcd.txn([absent(prefix + "a")], [put_op(prefix + "a", bytes(size))], token=prefix + "a"),
    ):
        with pytest.raises(EtcdError) as caught:
            call()
        assert not isinstance(caught.value, TransientEtcdError)
        assert f"{prefix}a ({str(size)[:3]}" in caught.value.message, "it says what was refused, and how large it is"
        assert "max-request-bytes" in caught.value.help


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
        assert "a transaction of 1 operations, the first on /w/a" in caught.value.message
        with pytest.raises(EtcdFull):
            etcd.lease_grant(10)
        assert etcd.lease_keepalive_once(lease) == ttl, "nobody loses its lease"
        assert etcd.get("/w/a") is None, "what was refused was not done"
        cure(etcd)
        assert not etcd.is_full()
        assert etcd.txn([absent("/w/a")], [put_op("/w/a", b"1")], token="/w/a").ok
        assert watch.wait(lambda view: set(view) == {"/w/before", "/w/a"}, 60)


def test_what_is_compacted_is_gone_when_the_call_returns(tmp_path: Path) -> None:
    """A defragmentation right after it freed nothing of a history that etcd was still to go through."""
    with EmbeddedEtcd(tmp_path) as server, Etcd(server.endpoints, deadline=60) as etcd:
        for _ in range(160):
            etcd.txn([], [put_op(f"/k/{number}", bytes(1000)) for number in range(128)])
        defragment(etcd)
        size = etcd.status().db_size
        etcd.compact(etcd.status().revision)
        defragment(etcd)
        assert etcd.status().db_size < size / 10


def test_permissions_are_refused_for_good(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as server:
        enable_login(server)
        guest = Etcd(server.endpoints, user="guest", password="guest", timeout=10, deadline=60)
        with guest as client, pytest.raises(EtcdError) as caught:
            client.put("/job/epoch", b"")
        assert caught.value.rule == "etcd-denied"
        assert not isinstance(caught.value, TransientEtcdError)
        assert "a put of /job/epoch" in caught.value.message


def test_a_login_that_expires_is_renewed(tmp_path: Path) -> None:
    """Tokens end after seconds here: by the server's clock, or with its memory. Nothing ends with them."""
    server = EmbeddedEtcd(tmp_path, binary=with_options("--auth-token-ttl=4"))
    with server:
        enable_login(server)
        root, other = (
            Etcd(server.endpoints, user="root", password="secret", timeout=10, deadline=60) for _ in range(2)
        )
        with root as client, other, Watch(client, "/w/") as watch:
            lease, ttl = client.lease_grant(120)
            other.ping(deadline=60)  # it has a token, too
            time.sleep(5.5)
            assert client.lease_keepalive_once(lease) == ttl
            assert other.txn([absent("/w/a")], [put_op("/w/a", b"1", lease)], token="/w/a").ok
            assert watch.wait(lambda view: "/w/a" in view, 60), "the watch goes on"
            server.restart()
            assert client.lease_keepalive_once(lease) == ttl
            assert client.txn([absent("/w/b")], [put_op("/w/b", b"1")]).ok, "without a token of the caller's, too"
            assert watch.wait(lambda view: "/w/b" in view, 60)
            until(lambda: watch.connected)
