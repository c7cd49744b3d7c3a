"""The chunk queue's records, and the one transaction that each transition is.

Per pass, under a prefix of its own (`keys.queue(pass)`):

    todo/<chunk>     stays until the chunk is done or failed; holds attempts and failures
    pending/<chunk>  the claim, under its trainer's lease: it goes when the trainer does, and nothing else need be done
    done/<chunk>, failed/<chunk>

So a pass is over when no `todo` record is left: pending and discarded chunks cannot be overlooked. The functions take
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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import msgspec

from graphft.errors import plain_text
from graphft.plan import PlannedChunk

MAX_PUTS = 100  # per transaction; etcd takes 128 operations


class Todo(msgspec.Struct, frozen=True):
    """Value of `todo/<chunk>`. `progress`: batches that were applied when it was claimed (or renewed) last."""

    attempt: int = 0
    failures: int = 0
    progress: int = 0
    open: bool = False
    """The last claim has not been released: when no claim is there any more, it failed."""


class Pending(msgspec.Struct, frozen=True):
    """Value of `pending/<chunk>`: who holds it, and on which terms.

    `slot`: sync, else -1. `start_step`: the chunk's first step (sync). `deadline`: wall-clock seconds. `max_failures`:
    so many in a row, without progress, make it poison.
    """

    trainer: str
    slot: int
    start_step: int
    deadline: float
    attempt: int = 1
    max_failures: int = 3


class Failed(msgspec.Struct, frozen=True):
    """Value of `failed/<chunk>`: it is left out from batch `progress` on, in this pass and in later ones."""

    reason: str
    failures: int
    progress: int = 0


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
        "claimed", "failed", "completed", "renewed", "released", "expired", "enqueued", "rewound", "went-back"
    ]
    """"failed": the chunk is poison, and left out from now on. "went-back": a new generation begins with it."""
    reason: str
    compares: tuple[Compare, ...]
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()


def todo_key(prefix: str, chunk: int) -> str:
    """Chunks are numbered with eight digits, so that a range over a key's beginning is a range of chunks."""
    return f"{prefix}todo/{chunk:08d}"


def pending_key(prefix: str, chunk: int) -> str:
    return f"{prefix}pending/{chunk:08d}"


def done_key(prefix: str, chunk: int) -> str:
    return f"{prefix}done/{chunk:08d}"


def failed_key(prefix: str, chunk: int) -> str:
    return f"{prefix}failed/{chunk:08d}"


def chunk_of(key: str) -> int:
    return int(key.rsplit("/", 1)[1])


def claim(
    prefix: str,
    chunk: int,
    todo: Record,
    *,
    trainer: str,
    slot: int = -1,
    start_step: int = 0,
    progress: int = 0,
    now: float,
    timeout: float,
    max_failures: int,
    max_lost: int | None = None,
) -> Change:
    """Claims a chunk whose `todo` record was read; or, when it failed too often, moves it to failed.

    `progress`: batches of it that are applied, as far as known. `now` and the deadline: wall-clock seconds.
    `max_lost`: so many holders in a row that vanished make it poison, too; None: they are not held against it.
    """
    old = msgspec.json.decode(todo.value, type=Todo)
    failures = 0 if progress > old.progress else old.failures + (old.open and max_lost is not None)
    compares = (
        Compare(todo_key(prefix, chunk), "mod", todo.mod_revision),
        Compare(pending_key(prefix, chunk), "create", 0),
    )
    if failures >= (max_failures if max_lost is None else max_lost):
        return _discard(prefix, chunk, failures, progress, compares, "its holders vanished")
    new = Todo(old.attempt + 1, failures, max(progress, old.progress), True)
    pending = Pending(trainer, slot, start_step, now + timeout, new.attempt, max_failures)
    return Change(
        "claimed",
        f"{trainer} claims chunk {chunk}, attempt {new.attempt}, {failures} failures",
        compares,
        (
            Put(todo_key(prefix, chunk), msgspec.json.encode(new)),
            Put(pending_key(prefix, chunk), msgspec.json.encode(pending), leased=True),
        ),
    )


def complete(prefix: str, chunk: int, fence: int) -> Change:
    """Completes a chunk under the claim whose create_revision is `fence`. All of its batches are applied."""
    return Change(
        "completed",
        f"chunk {chunk} is done",
        (Compare(pending_key(prefix, chunk), "create", fence),),
        (Put(done_key(prefix, chunk), b"{}"),),
        (todo_key(prefix, chunk), pending_key(prefix, chunk)),
    )


def renew(
    prefix: str, chunk: int, fence: int, pending: Pending, todo: Record, *, progress: int, now: float, timeout: float
) -> Change:
    """Moves the deadline of one's own claim on. When more has been applied, the failures so far are forgotten."""
    old = msgspec.json.decode(todo.value, type=Todo)
    moved = msgspec.structs.replace(pending, deadline=now + timeout)
    new = Todo(old.attempt, 0 if progress > old.progress else old.failures, max(progress, old.progress), True)
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
    old = msgspec.json.decode(todo.value, type=Todo)
    new = Todo(old.attempt, old.failures, max(progress, old.progress), False)
    return Change(
        "released",
        f"chunk {chunk} is handed over after {progress} batches",
        _own(prefix, chunk, fence, todo),
        (Put(todo_key(prefix, chunk), msgspec.json.encode(new)),),
        (pending_key(prefix, chunk),),
    )


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


def fail(prefix: str, chunk: int, fence: int, todo: Record, *, progress: int, reason: str, max_failures: int) -> Change:
    """Reports at once that a chunk under the own claim cannot be computed, and why; gives it back, or discards it.

    `progress`: the batch that failed. Failures of another batch before do not count. `reason` may be of any origin.
    """
    reason = plain_text(reason)
    old = msgspec.json.decode(todo.value, type=Todo)
    failures = old.failures + 1 if progress == old.progress else 1
    if failures >= max_failures:
        return _discard(prefix, chunk, failures, progress, _own(prefix, chunk, fence, todo), reason)
    new = Todo(old.attempt, failures, progress, False)
    return Change(
        "released",
        f"chunk {chunk} failed after {progress} batches: {reason}",
        _own(prefix, chunk, fence, todo),
        (Put(todo_key(prefix, chunk), msgspec.json.encode(new)),),
        (pending_key(prefix, chunk),),
    )


def _discard(
    prefix: str, chunk: int, failures: int, progress: int, compares: tuple[Compare, ...], cause: str
) -> Change:
    reason = (
        f"chunk {chunk} failed {failures} times in a row without progress, the last time after {progress} "
        f"batches ({cause}); it is left out from there on"
    )
    record = Failed(reason, failures, progress)
    return Change(
        "failed",
        reason,
        compares,
        (Put(failed_key(prefix, chunk), msgspec.json.encode(record)),),
        (todo_key(prefix, chunk), pending_key(prefix, chunk)),
    )


def discard_again(prefix: str, chunk: int, todo: Record, pending: Record | None, failed: Failed) -> Change:
    """Makes a chunk poison in a later pass, too, whose records were made before it was poison."""
    return Change(
        "failed",
        f"chunk {chunk} is left out in a later pass, too",
        (
            Compare(todo_key(prefix, chunk), "mod", todo.mod_revision),
            Compare(pending_key(prefix, chunk), "mod", pending.mod_revision if pending is not None else 0),
        ),
        (Put(failed_key(prefix, chunk), msgspec.json.encode(failed)),),
        (todo_key(prefix, chunk), pending_key(prefix, chunk)),
    )


def requeue(prefix: str, chunk: int, done: Record | None, progress: int, failed: Record | None = None) -> Change:
    """A shard that came back older lacks some of a chunk that is done (or whose records are gone): to do once more.

    `failed`: it is poison, and the shard lacks some of what comes before the batch that failed.
    """
    compares = (
        Compare(todo_key(prefix, chunk), "mod", 0),
        Compare(failed_key(prefix, chunk), "mod", failed.mod_revision if failed is not None else 0),
        Compare(done_key(prefix, chunk), "mod", done.mod_revision if done is not None else 0),
    )
    return Change(
        "rewound",
        f"chunk {chunk} is to be done again: a shard has {progress} batches of it",
        compares,
        (Put(todo_key(prefix, chunk), msgspec.json.encode(Todo(progress=progress))),),
        (done_key(prefix, chunk), failed_key(prefix, chunk)),
    )


def claimable(todo: Iterable[int], pending: Iterable[int]) -> list[int]:
    """Chunks that no trainer holds, ascending."""
    return sorted(set(todo) - set(pending))


def enqueue(
    prefix: str, chunks: Iterable[int], fence: Compare, poison: Mapping[int, Failed] | None = None
) -> list[Change]:
    """The todo records of a pass; of chunks that failed in the pass before (`poison`), failed records.

    `fence` holds as long as the pass has not begun (its record is written last): then nothing is claimed, and
    repeating this after a crash half-way changes nothing that is in use.
    """
    poison = poison or {}
    puts = [
        Put(failed_key(prefix, c), msgspec.json.encode(msgspec.structs.replace(poison[c], progress=0)))
        if c in poison
        else Put(todo_key(prefix, c), msgspec.json.encode(Todo()))
        for c in chunks
    ]
    return [
        Change("enqueued", f"{len(puts[i : i + MAX_PUTS])} chunks to do", (fence,), tuple(puts[i : i + MAX_PUTS]))
        for i in range(0, len(puts), MAX_PUTS)
    ]


def rewind(prefix: str, chunks: Iterable[PlannedChunk], step: int, records: Mapping[str, Record]) -> list[Change]:
    """Sets a pass's records to what the plan says of `step`: a chunk is done if its last step lies below.

    `records`: all of the pass's, by key. A failed chunk stays failed; one that is open keeps its claim.
    """
    return [change for planned in chunks if (change := _rewind(prefix, planned, step, records))]


def _rewind(prefix: str, planned: PlannedChunk, step: int, records: Mapping[str, Record]) -> Change | None:
    chunk = planned.chunk
    todo, pending, done, failed = (key(prefix, chunk) for key in (todo_key, pending_key, done_key, failed_key))
    if failed in records:
        return None
    compares = tuple(Compare(k, "mod", records[k].mod_revision if k in records else 0) for k in (todo, pending, done))
    if planned.last_step < step:
        return (
            None
            if done in records
            else Change(
                "rewound", f"chunk {chunk} is done at step {step}", compares, (Put(done, b"{}"),), (todo, pending)
            )
        )
    if done in records or todo not in records:
        return Change(
            "rewound",
            f"chunk {chunk} is to be done again from step {step} on",
            compares,
            (Put(todo, msgspec.json.encode(Todo())),),
            (done,),
        )
    old = msgspec.json.decode(records[todo].value, type=Todo)
    applied = max(0, step - planned.first_step)
    if old.progress <= applied:
        return None
    new = msgspec.structs.replace(old, progress=applied)
    return Change(
        "rewound", f"chunk {chunk} is back at batch {applied}", compares, (Put(todo, msgspec.json.encode(new)),)
    )
