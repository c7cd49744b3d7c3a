"""The chunk queue's transitions, on a store that does what etcd's transactions do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change, Compare, Known, Pending, Todo
from graphft.runtime.protocol.discards import Discard, Discards

P = "/q/0/"
DISCARDED = "/q/discarded/0"


@dataclass(frozen=True)
class Kept:
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
            self.keys[put.key] = Kept(put.value, created, self.revision, owner if put.leased else "")
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
        """Of chunk 0."""
        return msgspec.json.decode(self.keys[DISCARDED].value, type=Discards).discards if DISCARDED in self.keys else ()

    def names(self) -> set[str]:
        return {k.removeprefix(P).split("/")[0] for k in self.keys if k.startswith(P)}


@pytest.fixture
def store() -> MiniStore:
    store = MiniStore()
    for change in chunk_queue.enqueue(P, range(3), Compare("/pass", "mod", 0)):
        assert store.apply(change)
    return store


def claim(store: MiniStore, owner: str = "a", chunk: int = 0, progress: int = 0, now: float = 0.0) -> tuple[str, int]:
    change = chunk_queue.claim(
        P,
        chunk,
        store.keys[chunk_queue.todo_key(P, chunk)],
        trainer=owner,
        slot=1,
        progress=progress,
        now=now,
        timeout=60.0,
        max_failures=3,
        lost=(3, store.known()),
    )
    return change.outcome, store.apply(change, owner)


def test_a_claim_is_one_trainers_only(store: MiniStore) -> None:
    todo = store.keys[chunk_queue.todo_key(P, 0)]
    changes = [chunk_queue.claim(P, 0, todo, trainer=t, now=5.0, timeout=60.0, max_failures=3) for t in "ab"]
    assert [bool(store.apply(c, t)) for c, t in zip(changes, "ab", strict=True)] == [True, False]
    assert store.pending() == Pending("a", -1, 65.0, 1)
    assert chunk_queue.claimable([0, 1, 2], [0]) == [1, 2]


def test_only_the_owner_completes(store: MiniStore) -> None:
    """The fence is the claim's revision: a zombie cannot finish the new owner's chunk."""
    _, zombie = claim(store, "a")
    store.expire("a")
    _, owner = claim(store, "b")
    assert not store.apply(chunk_queue.complete(P, 0, zombie))
    assert not store.apply(chunk_queue.release(P, 0, zombie, store.keys[chunk_queue.todo_key(P, 0)], progress=9))
    assert store.pending().trainer == "b"
    assert store.apply(chunk_queue.complete(P, 0, owner))
    assert chunk_queue.done_key(P, 0) in store.keys
    assert not {chunk_queue.todo_key(P, 0), chunk_queue.pending_key(P, 0)} & store.keys.keys()


def test_a_failed_transaction_changes_nothing(store: MiniStore) -> None:
    """The records are the only state; a function never changes what it is given."""
    before = dict(store.keys)
    assert not store.apply(chunk_queue.complete(P, 0, 99))
    assert store.keys == before


def test_a_pass_is_over_when_nothing_is_to_do_which_includes_pending_and_discarded(store: MiniStore) -> None:
    """`todo` stays while a chunk is pending, and goes when it is done, with or without all batches."""
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
        assert change.reason.startswith(f"batch {batch} of chunk 0 in pass 0 failed 3 times in a row")
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
    """A record that could be read the other times stays; one failure that does not tell is no reason to lose more."""
    fail(store, 2, batch=7, records=(8,))  # of another batch: it does not count
    for records in blamed:
        fail(store, 1, records=records)
    assert store.discarded() == (Discard(0, 0, "it is bad", 3, records=discarded),)


def test_failures_of_different_batches_do_not_add_up(store: MiniStore) -> None:
    for batch in (0, 1, 0, 1):
        assert fail(store, 2, batch).outcome == "released"


def test_nothing_is_discarded_by_who_knows_less(store: MiniStore) -> None:
    """Another batch was discarded since the record was read."""
    fail(store, 2)
    known = store.known()
    store.keys[DISCARDED] = Kept(msgspec.json.encode(Discards((Discard(0, 7, "another"),))), 9, 9)
    _, fence = claim(store)
    todo = store.keys[chunk_queue.todo_key(P, 0)]
    change = chunk_queue.fail(P, 0, fence, todo, known, batch=0, reason="it is bad", max_failures=3)
    assert not store.apply(change)


def test_what_holders_vanish_in_is_discarded_from_there_on(store: MiniStore) -> None:
    for failures in range(3):
        assert claim(store)[0] == "claimed"
        assert (store.todo().attempt, store.todo().failures) == (failures + 1, failures)
        store.expire("a")
    assert claim(store)[0] == "discarded"
    assert store.discarded() == (Discard(0, 0, "its holders vanished", 3, rest=True),)
    assert claim(store)[0] == "claimed"


def test_progress_resets_the_count(store: MiniStore) -> None:
    """Preemptions never discard good data."""
    for progress in (0, 0, 0, 1, 1, 1, 2):
        assert claim(store, progress=progress)[0] == "claimed"
        store.expire("a")
    assert store.todo().failures == 0


def test_progress_that_was_renewed_counts_at_the_next_claim(store: MiniStore) -> None:
    for _ in range(2):
        claim(store)
        store.expire("a")
    _, fence = claim(store, now=100.0)
    assert store.todo().failures == 2
    change = chunk_queue.renew(
        P, 0, fence, store.pending(), store.keys[chunk_queue.todo_key(P, 0)], progress=4, now=150.0, timeout=60.0
    )
    assert store.apply(change, "a")
    assert (store.todo().failures, store.todo().progress, store.pending().deadline) == (0, 4, 210.0)
    store.expire("a")
    assert claim(store, progress=4)[0] == "claimed"
    assert store.todo().failures == 1


def test_a_hand_over_is_no_failure(store: MiniStore) -> None:
    for _ in range(5):
        outcome, fence = claim(store)
        assert outcome == "claimed"
        assert store.apply(chunk_queue.release(P, 0, fence, store.keys[chunk_queue.todo_key(P, 0)], progress=0))
    assert store.todo() == Todo(5, 0, 0, False)


def test_a_stale_claim_is_taken_away_unless_it_was_renewed(store: MiniStore) -> None:
    """Leases do not catch a trainer that lives, but is stuck."""
    _, fence = claim(store, now=0.0)
    seen = store.keys[chunk_queue.pending_key(P, 0)]
    assert chunk_queue.expire(P, 0, seen, now=60.0) is None
    late = chunk_queue.expire(P, 0, seen, now=61.5)
    assert late is not None
    assert late.reason == "chunk 0: a is 1.5 s over its deadline"
    renewed = chunk_queue.renew(
        P, 0, fence, store.pending(), store.keys[chunk_queue.todo_key(P, 0)], progress=1, now=60.0, timeout=60.0
    )
    assert store.apply(renewed, "a")
    assert not store.apply(late)
    late = chunk_queue.expire(P, 0, store.keys[chunk_queue.pending_key(P, 0)], now=121.0)
    assert late is not None
    assert store.apply(late)
    assert not store.apply(chunk_queue.complete(P, 0, fence))
    claim(store, "b")
    assert store.todo().failures == 1


def test_enqueueing_again_after_the_pass_began_changes_nothing(store: MiniStore) -> None:
    store.apply(chunk_queue.complete(P, 0, claim(store)[1]))
    began = Change("enqueued", "the pass begins", (), (chunk_queue.Put("/pass", b"0"),))
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
        self.now = 0.0

    chunks = st.integers(0, 2)

    @rule(chunk=chunks)
    def look(self, chunk: int) -> None:
        if chunk_queue.todo_key(P, chunk) in self.store.keys:
            self.stale[chunk] = self.store.keys[chunk_queue.todo_key(P, chunk)]

    @rule(chunk=chunks, owner=st.sampled_from("ab"), progress=st.integers(0, 2))
    def claim(self, chunk: int, owner: str, progress: int) -> None:
        change = chunk_queue.claim(
            P,
            chunk,
            self.stale[chunk],
            trainer=owner,
            progress=progress,
            now=self.now,
            timeout=10.0,
            max_failures=2,
            lost=(2, self.store.known()),
        )
        fence = self.store.apply(change, owner)
        if fence and change.outcome == "claimed":
            self.claims.append((chunk, owner, fence))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), what=st.sampled_from(["complete", "release"]))
    def end(self, data: st.DataObject, what: str) -> None:
        chunk, _, fence = data.draw(st.sampled_from(self.claims))
        pending = self.store.keys.get(chunk_queue.pending_key(P, chunk))
        change = (
            chunk_queue.complete(P, chunk, fence)
            if what == "complete"
            else chunk_queue.release(P, chunk, fence, self.stale[chunk], progress=0)
        )
        done = self.store.apply(change)
        assert not done or (pending is not None and pending.create_revision == fence)
        if done and what == "complete":
            self.completed.append(chunk)

    @rule(owner=st.sampled_from("ab"))
    def die(self, owner: str) -> None:
        self.store.expire(owner)

    @rule(chunk=chunks)
    def janitor(self, chunk: int) -> None:
        self.now += 6.0
        pending = self.store.keys.get(chunk_queue.pending_key(P, chunk))
        change = pending and chunk_queue.expire(P, chunk, pending, self.now)
        if change:
            self.store.apply(change)

    @invariant()
    def every_chunk_is_in_one_place(self) -> None:
        for chunk in range(3):
            places = [name for name in ("todo", "done") if f"{P}{name}/{chunk:08d}" in self.store.keys]
            assert len(places) == 1
            assert places == ["todo"] or chunk_queue.pending_key(P, chunk) not in self.store.keys
        assert len(self.completed) == len(set(self.completed))


TestQueueMachine = QueueMachine.TestCase
