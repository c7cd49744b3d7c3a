"""The transitions of the chunk queue, carried out in etcd."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from graphft.errors import plain_text
from graphft.ir import Program
from graphft.plan import Plan
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Barred, Committed, Failure, Generation, decode
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import KV, create_is, delete_op, get_op, mod_is, put_op, value_is
from graphft.runtime.etcd.model import Compare, Op, Store, TxnResult
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import (
    MAX_RECORD,
    Change,
    ChunkDiscards,
    Discards,
    Known,
    Pending,
    Put,
    count_records,
)

LOOKS = 20
"""Looks at stale claims per time-out."""


def commit(store: Store, changes: Sequence[Change], lease: int = 0, also: Iterable[Compare] = ()) -> TxnResult:
    """Commits the changes as one transaction, if `also` holds as well. `lease`: of the leased records.

    A claim is looked up when its answer was lost, since no other record is like it; any other ambiguous result raises
    EtcdError, and may be repeated, since its compares hold only once.
    """
    compares = [c for change in changes for c in change.compares]
    puts = [p for change in changes for p in change.puts]
    ops: list[Op] = [put_op(p.key, p.value, lease if p.leased else 0) for p in puts]
    ops += [delete_op(k) for change in changes for k in change.deletes]
    made = [create_is(c.key, c.revision) if c.target == "create" else mod_is(c.key, c.revision) for c in compares]
    claims = [p.key for change in changes if change.outcome == "claimed" for p in change.puts if p.leased]
    return store.txn([*made, *also], ops, token=claims[0] if claims else None)


def claims_chunks(program: Program) -> bool:
    """True if a trainer's program claims what it works on, from etcd or from a coordinator."""
    return any(program.find_op(name) is not None for name in ("etcd_get_chunk", "get_task"))


def give_back(store: Store, prefix: str, fences: Mapping[int, int], make: Callable[[int, KV], Change]) -> None:
    """Commits, as one transaction, what `make` makes of the todo records of claimed chunks.

    `fences`: by chunk, the revision of the claim. Claims that are another's by now stay.
    """
    chunks = list(fences)
    while True:
        keys = (chunk_queue.todo_key, chunk_queue.pending_key)
        read, changes = store.txn([], [get_op(key(prefix, c)) for c in chunks for key in keys]), list[Change]()
        for i, chunk in enumerate(chunks):
            todo, pending = read.kv(2 * i), read.kv(2 * i + 1)
            if todo is not None and pending is not None and pending.create_revision == fences[chunk]:
                changes.append(make(chunk, todo))
        if not changes or commit(store, changes).ok:
            return


def renew(store: Store, prefix: str, chunk: int, fence: int, lease: int, *, progress: int = 0) -> bool:
    """Renews a claim, with the progress of its holder. False: the claim is lost."""
    read = store.txn([], [get_op(chunk_queue.todo_key(prefix, chunk)), get_op(chunk_queue.pending_key(prefix, chunk))])
    todo, pending = read.kv(0), read.kv(1)
    if todo is None or pending is None or pending.create_revision != fence:
        return False
    return commit(store, [chunk_queue.renew(prefix, chunk, fence, pending, todo, progress)], lease).ok


def tell_discarded(events: Events, pass_index: int, chunk: int, change: Change) -> None:
    """Emits an event for a discard, or for the end of the job."""
    if change.outcome == "discarded":
        events.emit("discarded", f"DISCARDED: {change.reason}", chunk=chunk, pass_index=pass_index)
    elif change.outcome == "job-failed":
        events.emit("failed", change.reason, chunk=chunk, pass_index=pass_index)


class Ages:
    """Measures how long records have not changed, by this process's own clock: no two clocks are compared."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, kvs: Iterable[KV], now: float) -> dict[str, float]:
        """Returns the age of each record, by key."""
        seen = {kv.key: (kv.mod_revision, self._seen.get(kv.key, (0, now))) for kv in kvs}
        self._seen = {key: old if old[0] == revision else (revision, now) for key, (revision, old) in seen.items()}
        return {key: now - since for key, (_, since) in self._seen.items()}


class StaleClaims:
    """Takes away claims whose holders live but do not renew them: the second net below leases.

    The same transaction puts the holder into quarantine, so that it does not take the chunk back at once.
    """

    def __init__(self, etcd: Store, keys: Keys, events: Events) -> None:
        self.etcd, self.keys, self.events = etcd, keys, events
        self._ages = Ages()
        self._next = 0.0

    def look(self, pass_index: int, timeout: float, held: Collection[int] = ()) -> None:
        """Takes away what was not renewed for `timeout` seconds, but for claims with revisions `held`: the own ones.
        Any other claim in the own name is one whose answer was lost."""
        prefix, now = self.keys.queue(pass_index), time.monotonic()
        if now < self._next:
            return
        self._next = now + timeout / LOOKS
        pending = self.etcd.range(f"{prefix}pending/").kvs
        ages = self._ages.look(pending, now)
        for kv in pending:
            if kv.create_revision not in held and ages[kv.key] > timeout:
                self._take(prefix, kv, ages[kv.key])

    def _take(self, prefix: str, kv: KV, age: float) -> None:
        pending, chunk = msgspec.json.decode(kv.value, type=Pending), chunk_queue.chunk_of(kv.key)
        reason = f"it made no progress with chunk {chunk} for {age:.0f} s"
        bar = Put(self.keys.barred(pending.trainer), msgspec.json.encode(Barred(reason, self.events.who)), leased=True)
        change = dataclasses.replace(chunk_queue.displace(prefix, chunk, kv), puts=(bar,))
        also = []
        if pending.slot >= 0:  # sync: with the chunk goes the slot
            slot = self.keys.slot(pending.slot)
            also = [value_is(slot, pending.trainer.encode())]
            change = dataclasses.replace(change, deletes=(*change.deletes, slot))
        if commit(self.etcd, [change], kv.lease, also).ok:
            what = f"slot {pending.slot}" if pending.slot >= 0 else f"chunk {chunk}"
            self.events.emit(
                "stale-claim",
                f"{what} was taken from trainer {pending.trainer}: no progress for {age:.0f} s",
                chunk=chunk,
                slot=pending.slot,
                trainer=pending.trainer,
            )


# -- failures of batches ----------------------------------------------------------------------------------------------


def fail_batch(
    store: Store,
    keys: Keys,
    plan: Plan,
    pass_index: int,
    chunk: int,
    batch: int,
    *,
    claim: int,
    reason: str,
    records: Collection[int] = (),
    certain: bool = False,
) -> Change | None:
    """Counts a failure of a batch, reported by its trainer or by the launcher of a dead one. None: the claim with
    revision `claim` is another's by now.

    The claim holds the limits on failures and on discarded records. `records`: those to blame, if known. `certain`: the
    first failure is too many. A batch that is discarded already cannot fail: it is all the rest then. In sync mode a
    discard begins a new generation: a holder before may have sent the batch to some shards, so this step is done again
    without it on all of them.
    """
    prefix = keys.queue(pass_index)
    kinds = (chunk_queue.todo_key, chunk_queue.pending_key)
    read_keys = [
        *(key(prefix, chunk) for key in kinds),
        keys.discarded(chunk),
        keys.generation,
        keys.committed,
        keys.pass_,
    ]
    while True:
        read = store.txn([], [get_op(key) for key in read_keys])
        todo, pending, discarded = (read.kv(i) for i in range(3))
        if todo is None or pending is None or pending.create_revision != claim:
            return None
        terms = msgspec.json.decode(pending.value, type=Pending)
        known = Known(keys.discarded(chunk), pass_index, discarded)
        change = chunk_queue.fail(
            prefix,
            chunk,
            claim,
            todo,
            known,
            batch=batch,
            reason=reason,
            max_failures=1 if certain else terms.max_failures,
            records=records,
            rest=batch in ChunkDiscards(plan, chunk, known.discarded()).batches(pass_index),
        )
        change = or_end(store, keys, plan, known, change, terms.max_discarded)
        back, same = going_back(keys, change, *map(read.kv, range(3, 6))) if terms.slot >= 0 else ([], [])
        if commit(store, [change, *back], also=same).ok:
            return change


def going_back(
    keys: Keys, change: Change, current_kv: KV | None, committed_kv: KV | None, marker: KV | None
) -> tuple[list[Change], list[Compare]]:
    """Returns the change that raises the generation in sync mode if a batch is discarded, and its other conditions: all
    processes return to the newest checkpoint. If that is damaged, the shards find out when they read it."""
    if change.outcome != "discarded":
        return [], []
    current, committed = decode(current_kv, Generation), decode(committed_kv, Committed)
    assert current_kv is not None
    assert current is not None
    step, checkpoint = (committed.step, committed.checkpoint) if committed is not None else (0, "")
    raised = Generation(current.number + 1, step, checkpoint, plain_text(change.reason))
    back = Change(
        "went-back",
        (
            chunk_queue.Compare(keys.generation, "mod", current_kv.mod_revision),
            chunk_queue.Compare(keys.committed, "mod", committed_kv.mod_revision if committed_kv is not None else 0),
        ),
        (chunk_queue.Put(keys.generation, msgspec.json.encode(raised)),),
    )
    return [back], [mod_is(keys.pass_, marker.mod_revision)] if marker is not None else []


def or_end(store: Store, keys: Keys, plan: Plan, known: Known, change: Change, limit: int) -> Change:
    """Returns the change; or the end of the job as failed, which discards nothing, if the change discards more than
    `limit` records of the job's data (-1: any), or more pieces of one chunk than a record of etcd can hold."""
    if change.outcome != "discarded":
        return change
    put = next(put for put in change.puts if put.key == known.key)
    chunk, mine = chunk_queue.chunk_of(known.key), msgspec.json.decode(put.value, type=Discards)
    count = count_records(plan, read_discards(store, keys) | {chunk: mine})
    if count <= limit and len(put.value) <= MAX_RECORD:
        return change
    if count <= limit:
        pieces = f"{len(mine.discards)} pieces of chunk {chunk} are discarded"
        reason = f"{pieces}, more than one record of etcd can name: {change.cause}"
        remedy = "mend the data; or make smaller chunks: chunk_size=..."
    elif limit < 0:
        reason = f'on_bad_data="fail" ends the job at the first bad batch: {change.cause}'
        remedy = 'correct what the error names; or leave it out and go on: transpile(on_bad_data="discard")'
    else:
        reason = f"{count} of {sum(plan.records)} records would be discarded, at most {limit} may be: {change.cause}"
        remedy = "mend the data; or let the job lose more: transpile(max_discarded=...)"
    failure = Failure(plain_text(reason), remedy)
    puts = (Put(keys.state, b"failed"), Put(keys.failure, msgspec.json.encode(failure)))
    return Change("job-failed", change.compares, puts, reason=reason)
