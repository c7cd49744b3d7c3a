"""The chunk queue's transitions, on a store that does what etcd's transactions do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphft.plan import Plan
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import (
    LONGEST_REASON,
    Change,
    ChunkDiscards,
    Compare,
    Discard,
    Discards,
    Known,
    Pending,
    Todo,
    count_records,
)

P = "/q/0/"
DISCARDED = "/q/discarded/0"


@dataclass(frozen=True)
class Kept:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    owner: str = ""


class MiniStore:
    """Keys with revisions; one transaction at a time; leases by owner's name."""

    def __init__(self) -> None:
        self.keys: dict[str, Kept] = {}
        self.revision = 1

    def apply(self, change: Change, owner: str = "") -> int:
        """The revision of the transaction, or 0 when a comparison failed."""
        for c in change.compares:
            kept = self.keys.get(c.key)
            present = 0 if kept is None else kept.create_revision if c.target == "create" else kept.mod_revision
            if present != c.revision:
                return 0
        self.revision += 1
        for key in change.deletes:
            self.keys.pop(key, None)
        for put in change.puts:
            old = self.keys.get(put.key)
            created = old.create_revision if old else self.revision
            self.keys[put.key] = Kept(put.key, put.value, created, self.revision, owner if put.leased else "")
        return self.revision

    def expire(self, owner: str) -> None:
        self.keys = {k: v for k, v in self.keys.items() if v.owner != owner}

    def todo(self, chunk: int = 0) -> Todo:
        return msgspec.json.decode(self.keys[chunk_queue.todo_key(P, chunk)].value, type=Todo)

    def pending(self, chunk: int = 0) -> Pending:
        return msgspec.json.decode(self.keys[chunk_queue.pending_key(P, chunk)].value, type=Pending)

    def known(self) -> Known:
        return Known(DISCARDED, 0, self.keys.get(DISCARDED))

    def discarded(self) -> tuple[Discard, ...]:
        """Returns the discarded batches of chunk 0."""
        return msgspec.json.decode(self.keys[DISCARDED].value, type=Discards).discards if DISCARDED in self.keys else ()

    def names(self) -> set[str]:
        return {k.removeprefix(P).split("/")[0] for k in self.keys if k.startswith(P)}


@pytest.fixture
def store() -> MiniStore:
    store = MiniStore()
    for change in chunk_queue.enqueue(P, range(3), Compare("/pass", "mod", 0)):
        assert store.apply(change)
    return store


def claim(store: MiniStore, owner: str = "a", chunk: int = 0, progress: int = 0) -> tuple[str, int]:
    change = chunk_queue.claim(
        P,
        chunk,
        store.keys[chunk_queue.todo_key(P, chunk)],
        trainer=owner,
        slot=1,
        progress=progress,
        max_failures=3,
        lost=(3, store.known()),
    )
    return change.outcome, store.apply(change, owner)


def release(store: MiniStore, chunk: int, fence: int, todo: Any) -> bool:
    return bool(store.apply(chunk_queue.put_back(P, chunk, fence, todo, chunk_queue.decode_todo(todo).released(0))))


def test_only_the_owner_completes(store: MiniStore) -> None:
    _, zombie = claim(store, "a")
    store.expire("a")
    _, owner = claim(store, "b")
    assert not store.apply(chunk_queue.complete(P, 0, zombie))
    assert not release(store, 0, zombie, store.keys[chunk_queue.todo_key(P, 0)])
    assert store.pending().trainer == "b"
    assert store.apply(chunk_queue.complete(P, 0, owner))
    assert chunk_queue.done_key(P, 0) in store.keys
    assert not {chunk_queue.todo_key(P, 0), chunk_queue.pending_key(P, 0)} & store.keys.keys()


def test_a_pass_is_over_when_nothing_is_to_do_which_includes_pending_and_discarded(store: MiniStore) -> None:
    for chunk in (1, 2):
        store.apply(chunk_queue.complete(P, chunk, claim(store, chunk=chunk)[1]))
    fail(store, 3)
    assert store.discarded()
    _, fence = claim(store)
    assert "todo" in store.names()
    store.apply(chunk_queue.complete(P, 0, fence))
    assert store.names() == {"done"}


def fail(store: MiniStore, times: int, batch: int = 0, records: Sequence[int] = ()) -> Change:
    """So many times in a row this batch of chunk 0 cannot be computed."""
    options = {"batch": batch, "reason": "it is bad", "max_failures": 3, "records": records}
    for _ in range(times):
        _, fence = claim(store)
        todo = store.keys[chunk_queue.todo_key(P, 0)]
        change = chunk_queue.fail(P, 0, fence, todo, store.known(), **options)
        assert store.apply(change)
    return change


def test_a_batch_that_fails_too_often_is_discarded_and_its_chunk_goes_on(store: MiniStore) -> None:
    for batch in (0, 5):
        assert fail(store, 2, batch).outcome == "released"
        change = fail(store, 1, batch)
        assert change.outcome == "discarded"
        assert (store.todo().failures, store.todo().open) == (0, False)
    assert store.discarded() == (Discard(0, 0, "it is bad", 3), Discard(0, 5, "it is bad", 3))


@pytest.mark.parametrize(
    ("blamed", "discarded"),
    [
        ([(6,), (6,), (6, 1)], (6,)),
        ([(6, 1), (), (6,)], (6,)),
        ([(3, 5), (5,), ()], (5,)),
        ([(3,), (5,), (1,)], (1,)),
        ([(), (), ()], ()),
    ],
)
def test_records_are_discarded_that_all_failures_blame(
    store: MiniStore, blamed: Sequence[Sequence[int]], discarded: tuple[int, ...]
) -> None:
    fail(store, 2, batch=7, records=(8,))  # of another batch: it does not count
    for records in blamed:
        fail(store, 1, records=records)
    assert store.discarded() == (Discard(0, 0, "it is bad", 3, records=discarded),)


def test_failures_of_different_batches_do_not_add_up(store: MiniStore) -> None:
    for batch in (0, 1, 0, 1):
        assert fail(store, 2, batch).outcome == "released"


def test_what_holders_vanish_in_is_discarded_from_there_on(store: MiniStore) -> None:
    for failures in range(3):
        assert claim(store)[0] == "claimed"
        assert (store.todo().attempt, store.todo().failures) == (failures + 1, failures)
        store.expire("a")
    assert claim(store)[0] == "discarded"
    assert store.discarded() == (Discard(0, 0, "its holders vanished", 3, rest=True),)
    assert claim(store)[0] == "claimed"


def test_progress_that_was_renewed_counts_at_the_next_claim(store: MiniStore) -> None:
    for _ in range(2):
        claim(store)
        store.expire("a")
    _, fence = claim(store)
    assert store.todo().failures == 2
    key = chunk_queue.pending_key(P, 0)
    seen = store.keys[key]
    assert store.apply(chunk_queue.renew(P, 0, fence, seen, store.keys[chunk_queue.todo_key(P, 0)], 4), "a")
    assert (store.todo().failures, store.todo().progress) == (0, 4)
    assert not store.apply(chunk_queue.displace(P, 0, seen)), "it was renewed since"
    assert store.apply(chunk_queue.displace(P, 0, store.keys[key]))
    assert not store.apply(chunk_queue.complete(P, 0, fence))
    assert claim(store, progress=4)[0] == "claimed"
    assert store.todo().failures == 1
    store.expire("a")
    assert claim(store, progress=5)[0] == "claimed"
    assert store.todo().failures == 0


def test_enqueueing_again_after_the_pass_began_changes_nothing(store: MiniStore) -> None:
    store.apply(chunk_queue.complete(P, 0, claim(store)[1]))
    began = Change("enqueued", (), (chunk_queue.Put("/pass", b"0"),))
    assert store.apply(began)
    before = dict(store.keys)
    changes = chunk_queue.enqueue(P, range(250), Compare("/pass", "mod", 0))
    assert [len(c.puts) for c in changes] == [100, 100, 50]
    assert not any(store.apply(c) for c in changes)
    assert store.keys == before


def test_a_pass_that_is_over_is_closed_whoever_holds_its_chunks(store: MiniStore) -> None:
    _, fence = claim(store, chunk=1)
    changes = chunk_queue.close(P, (0, 1), store.keys)
    _, late = claim(store, chunk=0)
    assert [bool(store.apply(change)) for change in changes] == [False, True], "it was claimed since"
    assert not store.apply(chunk_queue.complete(P, 1, fence)), "it is done"
    assert store.apply(chunk_queue.complete(P, 0, late))
    assert sorted(k.removeprefix(P) for k in store.keys if k.startswith(P)) == [
        "done/00000000",
        "done/00000001",
        "todo/00000002",
    ]


class QueueMachine(RuleBasedStateMachine):
    """Trainers claim, hand over, die, get stuck and complete in any order; what they know may be old."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MiniStore()
        for change in chunk_queue.enqueue(P, range(3), Compare("/pass", "mod", 0)):
            self.store.apply(change)
        self.claims: list[tuple[int, str, int]] = []
        self.stale: dict[int, Any] = {c: self.store.keys[chunk_queue.todo_key(P, c)] for c in range(3)}
        self.completed: list[int] = []

    chunks = st.integers(0, 2)

    @rule(chunk=chunks)
    def look(self, chunk: int) -> None:
        if chunk_queue.todo_key(P, chunk) in self.store.keys:
            self.stale[chunk] = self.store.keys[chunk_queue.todo_key(P, chunk)]

    @rule(chunk=chunks, owner=st.sampled_from("ab"), progress=st.integers(0, 2))
    def claim(self, chunk: int, owner: str, progress: int) -> None:
        change = chunk_queue.claim(
            P, chunk, self.stale[chunk], trainer=owner, progress=progress, max_failures=2, lost=(2, self.store.known())
        )
        fence = self.store.apply(change, owner)
        if fence and change.outcome == "claimed":
            self.claims.append((chunk, owner, fence))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), what=st.sampled_from(["complete", "release"]))
    def end(self, data: st.DataObject, what: str) -> None:
        chunk, _, fence = data.draw(st.sampled_from(self.claims))
        pending = self.store.keys.get(chunk_queue.pending_key(P, chunk))
        if what == "complete":
            done = bool(self.store.apply(chunk_queue.complete(P, chunk, fence)))
        else:
            done = release(self.store, chunk, fence, self.stale[chunk])
        assert not done or (pending is not None and pending.create_revision == fence)
        if done and what == "complete":
            self.completed.append(chunk)

    @rule(owner=st.sampled_from("ab"))
    def die(self, owner: str) -> None:
        self.store.expire(owner)

    @rule(chunk=chunks)
    def displace(self, chunk: int) -> None:
        pending = self.store.keys.get(chunk_queue.pending_key(P, chunk))
        if pending:
            self.store.apply(chunk_queue.displace(P, chunk, pending))

    @invariant()
    def every_chunk_is_in_one_place(self) -> None:
        for chunk in range(3):
            places = [name for name in ("todo", "done") if f"{P}{name}/{chunk:08d}" in self.store.keys]
            assert len(places) == 1
            assert places == ["todo"] or chunk_queue.pending_key(P, chunk) not in self.store.keys
        assert len(self.completed) == len(set(self.completed))


TestQueueMachine = QueueMachine.TestCase


# -- what is discarded -------------------------------------------------------------------------------------------------

PLAN = Plan([10, 7], slots=1, batch_size=4, seed=3, passes=3)


def positions(pass_index: int, batch: int, chunk: int = 0) -> set[int]:
    return set(PLAN.positions(pass_index, chunk, batch).tolist())


def test_a_batch_is_discarded_of_its_pass_and_its_records_of_later_ones() -> None:
    found = ChunkDiscards(PLAN, 0, Discards((Discard(1, 2, "bad"),)))
    assert found.records(0) == frozenset()
    assert found.records(1) == found.records(2) == positions(1, 2)
    assert found.batches(1) == {2}
    assert sum(found.samples(2, b) for b in range(3)) == 8


def test_the_rest_of_a_chunk() -> None:
    found = ChunkDiscards(PLAN, 0, Discards((Discard(0, 1, "bad", rest=True),)))
    assert found.batches(0) == {1, 2}
    assert found.records(0) == positions(0, 1) | positions(0, 2)


def test_single_records_leave_the_rest_of_their_batch() -> None:
    bad = sorted(positions(0, 0))[:1]
    found = ChunkDiscards(PLAN, 0, Discards((Discard(0, 0, "bad", records=tuple(bad)),)))
    assert (found.samples(0, 0), found.batches(0)) == (3, frozenset())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=6))
def test_each_record_is_counted_once(discards: list[tuple[int, int, bool]]) -> None:
    made = Discards(tuple(Discard(p, b, "bad", rest=rest) for p, b, rest in discards))
    by_hand = set[int]()
    for p, b, rest in discards:
        by_hand |= set().union(*(positions(p, each, 1) for each in range(b, 2 if rest else b + 1)))
    assert count_records(PLAN, {1: made}) == len(by_hand)


def test_long_reasons_are_cut() -> None:
    found = Discards().having(Discard(0, 7, "batch 7 " + "x" * 1900))
    assert len(found.discards[0].reason) <= LONGEST_REASON
    assert found.without_reasons().discards[0] == Discard(0, 7, "")


def test_a_chunk_has_one_holder(store: MiniStore) -> None:
    assert claim(store, "a")[1]
    assert not claim(store, "b")[1]
