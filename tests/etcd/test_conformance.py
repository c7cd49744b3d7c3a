"""The real store and the simulated one do the same."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest
from etcd import servers

from graphft.runtime.etcd import (
    KV,
    MAX_TXN_OPS,
    CompactedError,
    EtcdError,
    Event,
    FencedStore,
    LeaseLost,
    Session,
    Store,
    Watch,
    absent,
    create_is,
    delete_op,
    delete_prefix_op,
    get_op,
    mod_is,
    put_op,
    range_op,
    value_is,
)
from tests.sim.etcd_store import SimEtcd
from tests.support.waiting import until


@pytest.fixture(params=["real", "simulated", "fenced"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """`fenced`: the real one, as processes of a run use it. The fence itself: tests/runtime/test_stale_run.py."""
    if request.param == "simulated":
        yield SimEtcd()
        return
    etcd: Store = request.getfixturevalue("etcd")
    fence = f"/fence-{uuid.uuid4().hex}"
    etcd.put(fence, b"run")
    yield etcd if request.param == "real" else FencedStore(etcd, fence, b"run")
    etcd.delete(fence)


def compact(store: Store, revision: int) -> None:
    if isinstance(store, SimEtcd):
        store.compact(revision)
    else:
        servers.compact(store.store if isinstance(store, FencedStore) else store, revision)  # type: ignore[arg-type]


@pytest.fixture
def root(store: Store) -> Iterator[str]:
    name = f"/conformance-{uuid.uuid4().hex}/"
    yield name
    store.delete_prefix(name)


def test_a_key_has_revisions_and_a_version(store: Store, root: str) -> None:
    assert store.get(root + "a") is None
    first = store.put(root + "a", b"1")
    second = store.put(root + "a", b"\x00\xff")
    assert second > first
    assert store.get(root + "a") == KV(root + "a", b"\x00\xff", first, second, 2)
    for _ in range(2):
        store.delete(root + "a")
        assert store.get(root + "a") is None
    third = store.put(root + "a", b"")
    assert store.get(root + "a") == KV(root + "a", b"", third, third, 1)


def test_range_is_sorted_limited_and_dated(store: Store, root: str) -> None:
    for name in ("b", "a", "c/1", "c"):
        last = store.put(root + name, name.encode())
    found = store.range(root)
    assert [kv.key for kv in found.kvs] == [root + n for n in ("a", "b", "c", "c/1")]
    assert found.revision >= last
    assert {kv.value for kv in store.range(root, keys_only=True).kvs} == {b""}
    assert [kv.key for kv in store.range(root + "c").kvs] == [root + "c", root + "c/1"]
    assert store.range(root + "none").kvs == ()
    assert store.count(root) == 4


def test_delete_prefix_deletes_what_starts_with_it_at_one_revision(store: Store, root: str) -> None:
    for name in ("x/1", "x/2", "y"):
        last = store.put(root + name, b"")
    store.delete_prefix(root + "x/")
    store.delete_prefix(root + "x/")
    assert [kv.key for kv in store.range(root).kvs] == [root + "y"]
    deletes = next(batch.events for batch in store.watch(root, last + 1) if batch.events)
    assert len(deletes) == 2
    assert len({e.kv.mod_revision for e in deletes}) == 1
    with pytest.raises(EtcdError):
        store.delete_prefix("")


def test_txn_runs_one_branch_at_one_revision(store: Store, root: str) -> None:
    start = store.put(root + "a", b"old")
    ops = [
        get_op(root + "a"),
        put_op(root + "a", b"new"),
        range_op(root),
        put_op(root + "b", b""),
        delete_op(root + "c"),
    ]
    done = store.txn([value_is(root + "a", b"old"), absent(root + "b")], ops)
    assert done.ok
    assert done.revision > start
    assert done.kv(0) == KV(root + "a", b"old", start, start, 1)
    assert [kv.value for kv in done.range(2).kvs] == [b"new"]  # a read sees the transaction's earlier writes
    assert done.responses[1] is None
    assert done.responses[4] == 0
    assert {kv.mod_revision for kv in store.range(root).kvs} == {done.revision}
    refused = store.txn([absent(root + "a")], [put_op(root + "a", b"never")], [get_op(root + "b"), get_op(root + "z")])
    assert not refused.ok
    assert refused.revision == done.revision
    assert refused.kv(0) == KV(root + "b", b"", done.revision, done.revision, 1)
    assert refused.kv(1) is None


def test_compares_fence_a_key(store: Store, root: str) -> None:
    yes, no = root + "yes", root + "no"
    revision = store.put(yes, b"v")
    hold = [absent(no), value_is(yes, b"v"), mod_is(no, 0), create_is(yes, revision)]
    fail = [absent(yes), value_is(yes, b"w"), value_is(no, b""), mod_is(yes, 1), create_is(yes, 0)]
    assert [each for each in hold + fail if store.txn([each], [], []).ok] == hold
    created = store.put(root + "k", b"1")
    changed = store.put(root + "k", b"2")
    assert not store.txn([mod_is(root + "k", created)], []).ok
    assert store.txn([mod_is(root + "k", changed), create_is(root + "k", created)], []).ok
    store.delete(root + "k")
    store.put(root + "k", b"2")
    assert not store.txn([create_is(root + "k", created)], []).ok


def test_txn_deletes_prefixes(store: Store, root: str) -> None:
    for name in ("a/1", "a/2", "b/1", "c"):
        store.put(root + name, b"")
    done = store.txn([], [delete_prefix_op(root + "a/"), delete_prefix_op(root + "b"), delete_prefix_op(root + "none")])
    assert done.responses == (2, 1, 0)
    assert [kv.key for kv in store.range(root).kvs] == [root + "c"]


def test_txn_refuses_what_etcd_would(store: Store, root: str) -> None:
    with pytest.raises(EtcdError):
        store.txn([], [put_op(f"{root}{i}", b"") for i in range(MAX_TXN_OPS + 1)])
    for twice in ([put_op(root, b"1"), put_op(root, b"2")], [put_op(root, b"1"), delete_op(root)]):
        with pytest.raises(EtcdError):
            store.txn([], twice)
    assert store.count(root) == 0
    full = [put_op(f"{root}{i}", b"") for i in range(MAX_TXN_OPS)]
    assert store.txn([absent(root + "0")], full).ok
    assert store.count(root) == MAX_TXN_OPS


def test_a_token_changes_nothing_when_all_is_answered(store: Store, root: str) -> None:
    key = root + "claim"
    first = store.txn([absent(key)], [put_op(key, b"me")], [get_op(key)], token=key)
    assert first.ok
    second = store.txn([absent(key)], [put_op(key, b"you")], [get_op(key)], token=key)
    assert not second.ok
    assert len(second.responses) == 1
    assert second.kv(0) == KV(key, b"me", first.revision, first.revision, 1)


def test_a_lease_takes_its_keys_along(store: Store, root: str) -> None:
    lease, ttl = store.lease_grant(30)
    assert ttl == 30
    store.put(root + "mine", b"", lease)
    store.put(root + "freed", b"", lease)
    store.put(root + "freed", b"")  # without the lease now
    assert [kv.lease for kv in store.range(root).kvs] == [0, lease]
    assert store.lease_keepalive_once(lease) == 30
    store.lease_revoke(lease)
    store.lease_revoke(lease)
    assert [kv.key for kv in store.range(root).kvs] == [root + "freed"]
    with pytest.raises(LeaseLost):
        store.lease_keepalive_once(lease)
    with pytest.raises(LeaseLost):
        store.put(root + "mine", b"", lease)
    with pytest.raises(LeaseLost):
        store.txn([], [put_op(root + "other", b""), put_op(root + "mine", b"", lease)])
    assert store.count(root) == 1


def test_a_lease_expires(store: Store, root: str) -> None:
    lease, _ = store.lease_grant(1)
    store.put(root + "left", b"", lease)
    until(lambda: store.get(root + "left") is None)
    with pytest.raises(LeaseLost):
        store.lease_keepalive_once(lease)


def test_a_stream_replays_the_history_from_a_revision(store: Store, root: str) -> None:
    first = store.put(root + "a", b"1")
    second = store.put(root + "a", b"2")
    third = store.txn([], [put_op(root + "b", b"3"), delete_op(root + "a")]).revision
    stream = store.watch(root, first + 1)
    seen: list[Event] = []
    for batch in stream:
        seen += batch.events
        if len(seen) == 3:
            break
    stream.cancel()
    changes = [(e.kind, e.kv.key, e.kv.value, e.kv.mod_revision) for e in seen]
    assert changes[0] == ("put", root + "a", b"2", second)
    # Within one revision, etcd promises no order.
    assert set(changes[1:]) == {("put", root + "b", b"3", third), ("delete", root + "a", b"", third)}


def test_a_stream_from_a_compacted_revision_says_so(store: Store, root: str) -> None:
    first = store.put(root + "a", b"1")
    last = store.put(root + "a", b"2")
    compact(store, last)
    stream = store.watch(root, first)
    with pytest.raises(CompactedError) as caught:
        for _ in stream:
            pass
    assert caught.value.compact_revision == last


def test_cancel_ends_a_stream_from_another_thread(store: Store, root: str) -> None:
    stream = store.watch(root, store.put(root + "a", b"") + 1)
    threading.Timer(0.1, stream.cancel).start()
    assert [event for batch in stream for event in batch.events] == []


def test_watch_keeps_a_view(store: Store, root: str) -> None:
    store.put(root + "old", b"0")
    told: list[bool] = []
    with Watch(store, root, lambda: told.append(True)) as watch:
        assert set(watch.snapshot()) == {root + "old"}
        assert len(told) == 1
        store.put(root + "new", b"1")
        revision = store.put(root + "new", b"2")
        kv = watch.wait(
            lambda view: root + "new" in view and view[root + "new"].version == 2 and view[root + "new"], 60
        )
        assert kv
        assert kv.value == b"2"
        assert watch.revision == revision
        store.delete(root + "old")
        assert watch.wait(lambda view: root + "old" not in view, 60)
        assert watch.wait(lambda view: root + "never" in view, 0.05) is None
    assert 3 <= len(told) <= 4, "two changes may come together"
    with pytest.raises(EtcdError):
        watch.snapshot()


def test_a_failing_callback_shows_where_the_view_is_used(store: Store, root: str) -> None:
    def fail() -> None:
        raise ValueError("bad value")

    with Watch(store, root, fail) as watch:
        store.put(root + "a", b"")
        with pytest.raises(EtcdError, match="bad value"):
            watch.wait(lambda view: False, 60)


def test_session_keeps_its_lease_and_revokes_it(store: Store, root: str) -> None:
    with Session(store, 15) as session:  # a busy machine may be late with a renewal, by seconds
        granted = session.page.renewed
        session.run_thread()
        store.put(root + "mine", b"", session.lease)
        until(lambda: session.check() or session.page.renewed > granted)
        session.check()
        assert store.get(root + "mine") is not None
    assert store.get(root + "mine") is None
    with pytest.raises(LeaseLost):
        session.check()
