"""The chunk queue's records, and the one transaction that each transition is.

Per pass, under a prefix of its own (`keys.queue(pass)`):

    todo/<chunk>     stays until the chunk is done; holds attempts and failures
    pending/<chunk>  the claim, under its trainer's lease: it goes when the trainer does, and nothing else need be done
    done/<chunk>

The records of a validation's ranges (`decisions.py`) are of the same kind, with their result in `done`.

So a pass is over when no `todo` record is left: pending chunks cannot be overlooked. A batch that fails too often is
discarded, and its chunk goes on without it (`discards.py`; a record beside the passes' own). The functions take
records as they were read, and return a `Change` as plain data; a driver makes an etcd transaction of it:

    change = claim(prefix, chunk, todo=store.get(todo_key(prefix, chunk)), ...)
    result = store.txn([compare ...], [put ..., delete ...])   # `Put.leased`: under this process's lease
    if result.ok and change.outcome == "claimed": fence = result.revision      # the claim's create_revision

A transaction that fails changed nothing: read again. The fence is compared by whatever relies on the claim, so a
trainer that was given up cannot complete, renew or release what has another owner now.

Failures are counted at the next claim: a claim that was neither completed nor released failed. It resets the count
when the chunk progressed meanwhile (`progress`: batches applied so far), so preemptions never discard good data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import msgspec

from graphft.errors import plain_text
from graphft.runtime.protocol.discards import Discard, Discards

MAX_PUTS = 100  # per transaction; etcd takes 128 operations
LOST_CLAIMS = 10
"""Holders that vanished (perhaps preempted) are held against a chunk `LOST_CLAIMS` times less than an error of its."""


class Todo(msgspec.Struct, frozen=True):
    """Value of `todo/<chunk>`. `progress`: batches that were applied when it was claimed (or renewed) last.

    What becomes of it is decided by its methods, for the queue in etcd and the coordinator's alike.
    """

    attempt: int = 0
    failures: int = 0
    progress: int = 0
    open: bool = False
    """The last claim has not been released: when no claim is there any more, it failed."""
    suspects: tuple[int, ...] = ()
    """Records of the batch that all failures in a row blame; (): none of them said which."""

    def claimed(self, progress: int = 0, vanished: bool = False) -> Todo:
        """Returns the record that a new holder, who knows of this progress, makes of it. `vanished`: a holder before
        who did is a failure."""
        failures = 0 if progress > self.progress else self.failures + (self.open and vanished)
        return Todo(self.attempt + 1, failures, max(progress, self.progress), True, self.suspects)

    def renewed(self, progress: int) -> Todo:
        """When more has been applied, the failures so far are forgotten."""
        failures = 0 if progress > self.progress else self.failures
        return Todo(self.attempt, failures, max(progress, self.progress), True, self.suspects)

    def released(self, progress: int) -> Todo:
        """On purpose: no failure."""
        return Todo(self.attempt, self.failures, max(progress, self.progress), False, self.suspects)

    def failed(self, batch: int, records: Collection[int]) -> Todo:
        """Failures of another batch before do not count."""
        failures = self.failures + 1 if batch == self.progress else 1
        return Todo(self.attempt, failures, batch, False, _suspects(self.suspects if failures > 1 else (), records))

    def discarded(self, batch: int) -> Todo:
        """Free again, without that batch; its failures so far are forgotten."""
        return Todo(self.attempt, 0, batch, False)


class Pending(msgspec.Struct, frozen=True):
    """Value of `pending/<chunk>`: who holds it, and on which terms.

    `slot`: sync, else -1. `deadline`: wall-clock seconds. `max_failures`:
    so many of a batch in a row, without progress, and it is discarded. `max_discarded`: more records of the job's data
    than these must not be discarded.
    """

    trainer: str
    slot: int
    deadline: float
    attempt: int = 1
    max_failures: int = 3
    max_discarded: int = 0


class Record(Protocol):
    """A key as it was read from etcd."""

    @property
    def value(self) -> bytes: ...
    @property
    def create_revision(self) -> int: ...
    @property
    def mod_revision(self) -> int: ...


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
    """One transaction: if all `compares` hold, all `puts` and `deletes` happen, else nothing."""

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
    """"went-back": a new generation begins with it."""
    reason: str
    compares: tuple[Compare, ...]
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()
    cause: str = ""
    """"discarded": what failed, without what follows from it."""


@dataclass(frozen=True, slots=True)
class Known:
    """Holds what is discarded of a chunk: its record as it was read, None if there is none, and where it is; seen from
    a pass."""

    key: str
    pass_index: int
    record: Record | None

    def discarded(self) -> Discards:
        return msgspec.json.decode(self.record.value, type=Discards) if self.record is not None else Discards()

    def discard(self, discard: Discard) -> tuple[Compare, Put]:
        """Adds one, if the record is still the one that was read."""
        old = self.discarded()
        revision = self.record.mod_revision if self.record is not None else 0
        return Compare(self.key, "mod", revision), Put(self.key, msgspec.json.encode(old.having(discard)))


def todo_key(prefix: str, chunk: int) -> str:
    """Chunks are numbered with eight digits, so that a range over a key's beginning is a range of chunks."""
    return f"{prefix}todo/{chunk:08d}"


def pending_key(prefix: str, chunk: int) -> str:
    return f"{prefix}pending/{chunk:08d}"


def done_key(prefix: str, chunk: int) -> str:
    return f"{prefix}done/{chunk:08d}"


def chunk_of(key: str) -> int:
    return int(key.rsplit("/", 1)[1])


def decode_todo(record: Record | None) -> Todo:
    return msgspec.json.decode(record.value, type=Todo) if record is not None else Todo()


def claim(
    prefix: str,
    chunk: int,
    todo: Record | None,
    *,
    trainer: str,
    slot: int = -1,
    progress: int = 0,
    now: float,
    timeout: float,
    max_failures: int,
    max_discarded: int = 0,
    lost: tuple[int, Known] | None = None,
) -> Change:
    """Claims a chunk whose `todo` record was read (None: it has none so far); or, when its holders vanished too often,
    discards what is left.

    `progress`: batches of it that are applied, as far as known. `now` and the deadline: wall-clock seconds.
    `lost`: how many holders in a row may vanish, and what is discarded so far; None: they are not held against it.
    """
    old = decode_todo(todo)
    new = old.claimed(progress, lost is not None)
    compares = (
        Compare(todo_key(prefix, chunk), "mod", todo.mod_revision if todo is not None else 0),
        Compare(pending_key(prefix, chunk), "create", 0),
    )
    if lost is not None and (found := vanished(chunk, old, progress, *lost)) is not None:
        return _with_todo(prefix, chunk, compares, *found)
    pending = Pending(trainer, slot, now + timeout, new.attempt, max_failures, max_discarded)
    return Change(
        "claimed",
        f"{trainer} claims chunk {chunk}, attempt {new.attempt}, {new.failures} failures",
        compares,
        (
            Put(todo_key(prefix, chunk), msgspec.json.encode(new)),
            Put(pending_key(prefix, chunk), msgspec.json.encode(pending), leased=True),
        ),
    )


def complete(prefix: str, chunk: int, fence: int, value: bytes = b"{}") -> Change:
    """Completes a chunk under the claim whose create_revision is `fence`. All of its batches are applied; `value`: what
    else is recorded of that."""
    return Change(
        "completed",
        f"chunk {chunk} is done",
        (Compare(pending_key(prefix, chunk), "create", fence),),
        (Put(done_key(prefix, chunk), value),),
        (todo_key(prefix, chunk), pending_key(prefix, chunk)),
    )


def renew(
    prefix: str, chunk: int, fence: int, pending: Pending, todo: Record, *, progress: int, now: float, timeout: float
) -> Change:
    """Moves the deadline of one's own claim on. When more has been applied, the failures so far are forgotten."""
    moved = msgspec.structs.replace(pending, deadline=now + timeout)
    new = msgspec.json.decode(todo.value, type=Todo).renewed(progress)
    return Change(
        "renewed",
        f"chunk {chunk} has {progress} batches applied",
        _own(prefix, chunk, fence, todo),
        (
            Put(todo_key(prefix, chunk), msgspec.json.encode(new)),
            Put(pending_key(prefix, chunk), msgspec.json.encode(moved), leased=True),
        ),
    )


def release(prefix: str, chunk: int, fence: int, todo: Record, *, progress: int) -> Change:
    """Gives one's own claim back on purpose (a slot is handed over): no failure."""
    reason = f"chunk {chunk} is handed over after {progress} batches"
    return put_back(prefix, chunk, fence, todo, decode_todo(todo).released(progress), reason)


def put_back(prefix: str, chunk: int, fence: int, todo: Record, new: Todo, reason: str) -> Change:
    """Gives one's own claim back: the chunk is todo, with this record."""
    return _with_todo(prefix, chunk, _own(prefix, chunk, fence, todo), new, Change("released", reason, ()))


def _own(prefix: str, chunk: int, fence: int, todo: Record) -> tuple[Compare, ...]:
    return (
        Compare(pending_key(prefix, chunk), "create", fence),
        Compare(todo_key(prefix, chunk), "mod", todo.mod_revision),
    )


def displace(prefix: str, chunk: int, pending: Record) -> Change:
    """Takes a claim away from its holder. The caller knows that the holder has lost the right to it."""
    return Change(
        "expired",
        f"chunk {chunk} was left claimed",
        (Compare(pending_key(prefix, chunk), "mod", pending.mod_revision),),
        (),
        (pending_key(prefix, chunk),),
    )


def expire(prefix: str, chunk: int, pending: Record, now: float) -> Change | None:
    """Takes a claim away whose deadline is over: its holder lives, but is stuck. None: it is in time."""
    claim_ = msgspec.json.decode(pending.value, type=Pending)
    if now <= claim_.deadline:
        return None
    reason = f"chunk {chunk}: {claim_.trainer} is {now - claim_.deadline:.1f} s over its deadline"
    return replace(displace(prefix, chunk, pending), reason=reason)


def fail(prefix: str, chunk: int, fence: int, todo: Record, known: Known, **failure: Any) -> Change:
    """Reports at once that a batch of a chunk under the own claim has `failed`; gives the chunk back."""
    new, change = failed(chunk, msgspec.json.decode(todo.value, type=Todo), known, **failure)
    return _with_todo(prefix, chunk, _own(prefix, chunk, fence, todo), new, change)


def _with_todo(prefix: str, chunk: int, compares: tuple[Compare, ...], todo: Todo, change: Change) -> Change:
    """The change, with the chunk's own records: it is free again."""
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
    """Returns what a chunk is when a batch of it has failed, and the change beside it.

    The batch is discarded when it has failed too often in a row, and with `rest` all batches behind it; only the
    records to blame if that is known: `records` (positions in the chunk) of this failure, those among them that the
    failures before blame as well. Failures of another batch before do not count. `reason` may be of any origin.
    """
    reason = plain_text(reason)
    new = todo.failed(batch, records)
    if new.failures < max_failures:
        return new, Change("released", f"chunk {chunk} failed at batch {batch}: {reason}", ())
    return _discard(
        chunk, todo, Discard(known.pass_index, batch, reason, new.failures, rest, () if rest else new.suspects), known
    )


def vanished(chunk: int, todo: Todo, progress: int, limit: int, known: Known) -> tuple[Todo, Change] | None:
    """Does as `failed`, of a chunk that nobody holds: the rest of it is discarded if `limit` of its holders in a row
    have vanished, which may have been preempted. None: not so many have."""
    failures = todo.claimed(progress, vanished=True).failures
    if failures < limit:
        return None
    discard = Discard(known.pass_index, progress, "its holders vanished", failures, rest=True)
    return _discard(chunk, todo, discard, known)


def _suspects(before: Collection[int], now: Collection[int]) -> tuple[int, ...]:
    """Failures that agree on records blame these; if they agree on none, the last one that named any is believed."""
    return tuple(sorted(set(before) & set(now) or set(now) or set(before)))


def _discard(chunk: int, todo: Todo, discard: Discard, known: Known) -> tuple[Todo, Change]:
    """The chunk goes on without what is discarded; its failures so far are forgotten."""
    what = f"chunk {chunk} from batch {discard.batch} on" if discard.rest else f"batch {discard.batch} of chunk {chunk}"
    lost = f"{len(discard.records)} of its records" if discard.records else "its records"
    times = f" {discard.failures} times in a row without progress" if discard.failures > 1 else ""
    same, put = known.discard(discard)
    text = f"{what} in pass {discard.pass_index} failed{times} ({discard.reason})"
    are = "is" if len(discard.records) == 1 else "are"
    change = Change("discarded", f"{text}; {lost} {are} discarded from there on", (same,), (put,), cause=text)
    return todo.discarded(discard.batch), change


def requeue(prefix: str, chunk: int, done: Record | None, progress: int, failures: int = 0) -> Change:
    """A shard that came back older lacks some of a chunk that is done (or whose records are gone): to do once more."""
    compares = (
        Compare(todo_key(prefix, chunk), "mod", 0),
        Compare(done_key(prefix, chunk), "mod", done.mod_revision if done is not None else 0),
    )
    return Change(
        "rewound",
        f"chunk {chunk} is to be done again: a shard has {progress} batches of it",
        compares,
        (Put(todo_key(prefix, chunk), msgspec.json.encode(Todo(failures=failures, progress=progress))),),
        (done_key(prefix, chunk),),
    )


def claimable(todo: Iterable[int], pending: Iterable[int]) -> list[int]:
    """Chunks that no trainer holds, ascending."""
    return sorted(set(todo) - set(pending))


def enqueue(prefix: str, chunks: Iterable[int], fence: Compare) -> list[Change]:
    """The todo records of a pass.

    `fence` holds as long as the pass has not begun (its record is written last): then nothing is claimed, and
    repeating this after a crash half-way changes nothing that is in use.
    """
    puts = [Put(todo_key(prefix, c), msgspec.json.encode(Todo())) for c in chunks]
    return [
        Change("enqueued", f"{len(puts[i : i + MAX_PUTS])} chunks to do", (fence,), tuple(puts[i : i + MAX_PUTS]))
        for i in range(0, len(puts), MAX_PUTS)
    ]


def close(prefix: str, chunks: Iterable[int], records: Mapping[str, Record]) -> list[Change]:
    """Chunks that are todo or pending are done, whoever holds them: all of their batches are applied. `records`: all of
    the pass's, by key."""
    changes = []
    for chunk in chunks:
        keys = todo, pending, done = todo_key(prefix, chunk), pending_key(prefix, chunk), done_key(prefix, chunk)
        same = tuple(Compare(k, "mod", records[k].mod_revision if k in records else 0) for k in keys)
        reason = f"chunk {chunk} is done, as its pass is"
        changes.append(Change("completed", reason, same, (Put(done, b"{}"),), (todo, pending)))
    return changes
