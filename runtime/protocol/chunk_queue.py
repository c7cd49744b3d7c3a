"""The records of the chunk queue, and the one transaction that each of its transitions is.

Each pass has a prefix of its own (`keys.queue(pass)`):

    todo/<chunk>     stays until the chunk is done; counts attempts and failures
    pending/<chunk>  the claim, under its trainer's lease: it ends when the trainer does
    done/<chunk>

A pass is over when no `todo` record is left. The ranges of a validation have records of the same kind, with their
result in `done`. A batch that fails too often is discarded (`/<job>.queue/discarded/<chunk>`), its records in all later
passes too, and its chunk goes on without it; what was computed before stays as it was.

Functions take records as they were read and return a `Change`, which a driver makes a transaction of. One that fails
has changed nothing: read again. The fence of a claim is its create_revision: whatever relies on the claim compares it,
so a trainer that has lost its claim can neither complete, renew nor release the chunk.

Failures are counted at the next claim: a claim that was neither completed nor released has failed. Progress since
(`progress`: batches applied) resets the count, so preemptions never discard good data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from graphft.errors import plain_text
from graphft.plan import Plan

MAX_PUTS = 100  # per transaction; etcd takes 128 operations
LOST_CLAIMS = 10
"""A holder that vanished, perhaps preempted, weighs so many times less than an error of the chunk."""
LONGEST_REASON = 500
"""Characters of a discard's reason that are kept."""
MAX_RECORD = 1 << 20
"""Bytes of a chunk's Discards; etcd takes 1.5 MB."""


class Record(Protocol):
    """A key as it was read from etcd."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> bytes: ...
    @property
    def create_revision(self) -> int: ...
    @property
    def mod_revision(self) -> int: ...


# -- what is discarded ------------------------------------------------------------------------------------------------


class Discard(msgspec.Struct, frozen=True):
    """Batch `batch` of pass `pass_index` has failed; with `rest`, all batches of the chunk behind it as well.

    `records`: positions in the chunk of the bad records, where they are known; (): all records of the batch.
    """

    pass_index: int
    batch: int
    reason: str
    failures: int = 1
    rest: bool = False
    records: tuple[int, ...] = ()


class Discards(msgspec.Struct, frozen=True):
    """All discards of one chunk."""

    discards: tuple[Discard, ...] = ()

    def having(self, discard: Discard) -> Discards:
        """Returns these and one more."""
        short = plain_text(discard.reason, LONGEST_REASON)
        return Discards((*self.discards, msgspec.structs.replace(discard, reason=short)))

    def without_reasons(self) -> Discards:
        """Returns what a process needs that reads the chunk."""
        return Discards(tuple(msgspec.structs.replace(discard, reason="") for discard in self.discards))


class ChunkDiscards:
    """The discards of a chunk, applied to the batches of `plan`."""

    def __init__(self, plan: Plan, chunk: int, record: Discards) -> None:
        self._plan, self._chunk = plan, chunk
        self._positions = [(o.pass_index, positions_of(plan, chunk, o)) for o in record.discards]

    def records(self, pass_index: int) -> frozenset[int]:
        """Returns the positions in the chunk that the pass discards."""
        return frozenset().union(*(found for since, found in self._positions if since <= pass_index))

    def samples(self, pass_index: int, batch: int) -> int:
        """Returns the number of records of a batch that are left."""
        return len(set(self._plan.positions(pass_index, self._chunk, batch).tolist()) - self.records(pass_index))

    def batches(self, pass_index: int) -> frozenset[int]:
        """Returns the batches of which nothing is left."""
        return frozenset(b for b in range(int(self._plan.batches[self._chunk])) if not self.samples(pass_index, b))


def discards_of(plan: Plan, record: Record | None) -> ChunkDiscards | None:
    if record is None:
        return None
    return ChunkDiscards(plan, chunk_of(record.key), msgspec.json.decode(record.value, type=Discards))


def count_records(plan: Plan, discarded: Mapping[int, Discards]) -> int:
    """Returns the number of records that are discarded, counting each once."""
    return sum(len(ChunkDiscards(plan, chunk, found).records(plan.passes)) for chunk, found in discarded.items())


def positions_of(plan: Plan, chunk: int, discard: Discard) -> frozenset[int]:
    """Returns the positions in the chunk of the records that it discards."""
    if discard.records:
        return frozenset(discard.records)
    last = int(plan.batches[chunk]) if discard.rest else discard.batch + 1
    found = [plan.positions(discard.pass_index, chunk, b) for b in range(discard.batch, last)]
    return frozenset(np.concatenate(found).tolist()) if found else frozenset()


# -- records of a chunk -----------------------------------------------------------------------------------------------


class Todo(msgspec.Struct, frozen=True):
    """The value of `todo/<chunk>`; its methods are the transitions, for etcd's queue and the coordinator's alike.

    `progress`: batches that were applied when the chunk was last claimed or renewed. `open`: the last claim was not
    released, so that it has failed if it is gone. `suspects`: records that all failures in a row blame.
    """

    attempt: int = 0
    failures: int = 0
    progress: int = 0
    open: bool = False
    suspects: tuple[int, ...] = ()

    def claimed(self, progress: int = 0, vanished: bool = False) -> Todo:
        """`vanished`: counts a failure if the holder before has vanished."""
        failures = 0 if progress > self.progress else self.failures + (self.open and vanished)
        return Todo(self.attempt + 1, failures, max(progress, self.progress), True, self.suspects)

    def renewed(self, progress: int) -> Todo:
        """Forgets the failures when more has been applied."""
        failures = 0 if progress > self.progress else self.failures
        return Todo(self.attempt, failures, max(progress, self.progress), True, self.suspects)

    def released(self, progress: int) -> Todo:
        """Counts no failure."""
        return Todo(self.attempt, self.failures, max(progress, self.progress), False, self.suspects)

    def failed(self, batch: int, records: Collection[int]) -> Todo:
        """Counts a failure; those of another batch before do not count."""
        failures = self.failures + 1 if batch == self.progress else 1
        return Todo(self.attempt, failures, batch, False, _suspects(self.suspects if failures > 1 else (), records))

    def discarded(self, batch: int) -> Todo:
        """Forgets the failures: the chunk goes on without that batch."""
        return Todo(self.attempt, 0, batch, False)


class Pending(msgspec.Struct, frozen=True):
    """The value of `pending/<chunk>`: its holder and the terms of the claim.

    `slot`: -1 in async mode. `max_failures`: failures of a batch in a row at which it is discarded. `max_discarded`:
    the limit on discarded records of the whole data.
    """

    trainer: str
    slot: int = -1
    attempt: int = 1
    max_failures: int = 3
    max_discarded: int = 0


@dataclass(frozen=True, slots=True)
class Compare:
    """The key has this create or mod revision; 0: it is absent."""

    key: str
    target: Literal["create", "mod"]
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    leased: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One transaction: if all `compares` hold, all `puts` and `deletes` happen, else nothing.

    "went-back" begins a new generation. `reason`: of a failure, and of what follows from it; `cause`, of "discarded":
    the failure alone.
    """

    outcome: Literal[
        "claimed",
        "discarded",
        "completed",
        "renewed",
        "released",
        "expired",
        "enqueued",
        "rewound",
        "went-back",
        "job-failed",
    ]
    compares: tuple[Compare, ...] = ()
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()
    reason: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """The Discards of a chunk as they were read (None: there are none) at `key`, seen from a pass."""

    key: str
    pass_index: int
    record: Record | None

    def discarded(self) -> Discards:
        return msgspec.json.decode(self.record.value, type=Discards) if self.record is not None else Discards()

    def discard(self, discard: Discard) -> tuple[Compare, Put]:
        """Adds one, if the record is still the one that was read."""
        revision = self.record.mod_revision if self.record is not None else 0
        value = msgspec.json.encode(self.discarded().having(discard))
        return Compare(self.key, "mod", revision), Put(self.key, value)


def todo_key(prefix: str, chunk: int) -> str:
    """Chunks have eight digits, so that a range over the beginning of a key is a range of chunks."""
    return f"{prefix}todo/{chunk:08d}"


def pending_key(prefix: str, chunk: int) -> str:
    return f"{prefix}pending/{chunk:08d}"


def done_key(prefix: str, chunk: int) -> str:
    return f"{prefix}done/{chunk:08d}"


def chunk_of(key: str) -> int:
    return int(key.rsplit("/", 1)[1])


def decode_todo(record: Record | None) -> Todo:
    return msgspec.json.decode(record.value, type=Todo) if record is not None else Todo()


# -- transitions of a claim -------------------------------------------------------------------------------------------


def claim(
    prefix: str,
    chunk: int,
    todo: Record | None,
    *,
    trainer: str,
    slot: int = -1,
    progress: int = 0,
    max_failures: int,
    max_discarded: int = 0,
    lost: tuple[int, Known] | None = None,
) -> Change:
    """Claims a chunk, or discards the rest of it when its holders have vanished too often.

    `todo` None: the chunk has no record so far. `progress`: its batches that are applied, as far as known. `lost`: how
    many holders in a row may vanish, and what is discarded so far; None: they do not count.
    """
    old = decode_todo(todo)
    new = old.claimed(progress, lost is not None)
    compares = (
        Compare(todo_key(prefix, chunk), "mod", todo.mod_revision if todo is not None else 0),
        Compare(pending_key(prefix, chunk), "create", 0),
    )
    if lost is not None and (found := vanished(chunk, old, progress, *lost)) is not None:
        return _with_todo(prefix, chunk, compares, *found)
    pending = Pending(trainer, slot, new.attempt, max_failures, max_discarded)
    return Change("claimed", compares, _held(prefix, chunk, new, pending))


def _held(prefix: str, chunk: int, todo: Todo, pending: Pending) -> tuple[Put, Put]:
    return (
        Put(todo_key(prefix, chunk), msgspec.json.encode(todo)),
        Put(pending_key(prefix, chunk), msgspec.json.encode(pending), leased=True),
    )


def complete(prefix: str, chunk: int, fence: int, value: bytes = b"{}") -> Change:
    """Completes a chunk, all of whose batches are applied, under the claim with create_revision `fence`."""
    mine = (Compare(pending_key(prefix, chunk), "create", fence),)
    done = (Put(done_key(prefix, chunk), value),)
    return Change("completed", mine, done, (todo_key(prefix, chunk), mine[0].key))


def renew(prefix: str, chunk: int, fence: int, pending: Record, todo: Record, progress: int) -> Change:
    """Rewrites one's own claim, which others see as new, and its progress."""
    held = _held(prefix, chunk, decode_todo(todo).renewed(progress), msgspec.json.decode(pending.value, type=Pending))
    return Change("renewed", _own(prefix, chunk, fence, todo), held)


def put_back(prefix: str, chunk: int, fence: int, todo: Record, new: Todo) -> Change:
    """Gives one's own claim back: the chunk is todo, with the record `new`."""
    return _with_todo(prefix, chunk, _own(prefix, chunk, fence, todo), new, Change("released"))


def _own(prefix: str, chunk: int, fence: int, todo: Record) -> tuple[Compare, ...]:
    return (
        Compare(pending_key(prefix, chunk), "create", fence),
        Compare(todo_key(prefix, chunk), "mod", todo.mod_revision),
    )


def displace(prefix: str, chunk: int, pending: Record) -> Change:
    """Takes a claim from its holder, who has lost the right to it or does not renew it."""
    key = pending_key(prefix, chunk)
    return Change("expired", (Compare(key, "mod", pending.mod_revision),), deletes=(key,))


def fail(prefix: str, chunk: int, fence: int, todo: Record, known: Known, **failure: Any) -> Change:
    """Counts a failure (see `failed`) of a batch under one's own claim, and gives the chunk back."""
    new, change = failed(chunk, decode_todo(todo), known, **failure)
    return _with_todo(prefix, chunk, _own(prefix, chunk, fence, todo), new, change)


def _with_todo(prefix: str, chunk: int, compares: tuple[Compare, ...], todo: Todo, change: Change) -> Change:
    """Adds to a change that the chunk is free again."""
    put = Put(todo_key(prefix, chunk), msgspec.json.encode(todo))
    return replace(
        change, compares=(*compares, *change.compares), puts=(put, *change.puts), deletes=(pending_key(prefix, chunk),)
    )


def failed(
    chunk: int,
    todo: Todo,
    known: Known,
    *,
    batch: int,
    reason: str,
    max_failures: int,
    records: Collection[int] = (),
    rest: bool = False,
) -> tuple[Todo, Change]:
    """Returns what a chunk is after a failure of a batch, and what is changed beside its records.

    A batch that has failed too often in a row is discarded, with `rest` all batches behind it. `records`: positions in
    the chunk of those to blame, if known; then only those are discarded that its failures agree on.
    """
    reason = plain_text(reason)
    new = todo.failed(batch, records)
    if new.failures < max_failures:
        return new, Change("released", reason=f"chunk {chunk} failed at batch {batch}: {reason}")
    bad = () if rest else new.suspects
    return _discard(chunk, todo, Discard(known.pass_index, batch, reason, new.failures, rest, bad), known)


def vanished(chunk: int, todo: Todo, progress: int, limit: int, known: Known) -> tuple[Todo, Change] | None:
    """Discards the rest of a chunk that nobody holds if `limit` of its holders in a row have vanished; else None."""
    failures = todo.claimed(progress, vanished=True).failures
    if failures < limit:
        return None
    discard = Discard(known.pass_index, progress, "its holders vanished", failures, rest=True)
    return _discard(chunk, todo, discard, known)


def _suspects(before: Collection[int], now: Collection[int]) -> tuple[int, ...]:
    """Returns the records that failures agree on; if there are none, those that the last one named."""
    return tuple(sorted(set(before) & set(now) or set(now) or set(before)))


def _discard(chunk: int, todo: Todo, discard: Discard, known: Known) -> tuple[Todo, Change]:
    what = f"chunk {chunk} from batch {discard.batch} on" if discard.rest else f"batch {discard.batch} of chunk {chunk}"
    lost = f"{len(discard.records)} of its records" if discard.records else "its records"
    times = f" {discard.failures} times in a row without progress" if discard.failures > 1 else ""
    same, put = known.discard(discard)
    text = f"{what} in pass {discard.pass_index} failed{times} ({discard.reason})"
    are = "is" if len(discard.records) == 1 else "are"
    reason = f"{text}; {lost} {are} discarded from there on"
    return todo.discarded(discard.batch), Change("discarded", (same,), (put,), reason=reason, cause=text)


# -- transitions of a pass --------------------------------------------------------------------------------------------


def requeue(prefix: str, chunk: int, done: Record | None, progress: int, failures: int = 0) -> Change:
    """Has a chunk done again that is done, or whose records are gone: a shard that went back lacks some of it."""
    todo, key = todo_key(prefix, chunk), done_key(prefix, chunk)
    compares = (Compare(todo, "mod", 0), Compare(key, "mod", done.mod_revision if done is not None else 0))
    put = Put(todo, msgspec.json.encode(Todo(failures=failures, progress=progress)))
    return Change("rewound", compares, (put,), (key,))


def enqueue(prefix: str, chunks: Iterable[int], fence: Compare) -> list[Change]:
    """Makes the todo records of a pass. `fence` holds until the pass has begun (its record is written last), so this
    may be repeated after a crash half-way."""
    puts = [Put(todo_key(prefix, c), msgspec.json.encode(Todo())) for c in chunks]
    parts = [tuple(puts[i : i + MAX_PUTS]) for i in range(0, len(puts), MAX_PUTS)]
    return [Change("enqueued", (fence,), part) for part in parts]


def close(prefix: str, chunks: Iterable[int], records: Mapping[str, Record]) -> list[Change]:
    """Completes chunks that are todo or pending, whoever holds them: all of their batches are applied. `records`: those
    of the pass, by key."""
    changes = []
    for chunk in chunks:
        keys = todo, pending, done = todo_key(prefix, chunk), pending_key(prefix, chunk), done_key(prefix, chunk)
        same = tuple(Compare(k, "mod", records[k].mod_revision if k in records else 0) for k in keys)
        changes.append(Change("completed", same, (Put(done, b"{}"),), (todo, pending)))
    return changes
