"""The chunk queue's records in etcd: the protocol's transitions carried out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from graphft.ir import Program
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Barred
from graphft.runtime.etcd import KV, create_is, delete_op, get_op, mod_is, put_op, value_is
from graphft.runtime.etcd.model import Compare, Op, Store, TxnResult
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change, Pending, Put

LOOKS = 20
"""Looks at stale claims per time-out: few enough that etcd is not asked all the time."""


def commit(store: Store, changes: Sequence[Change], lease: int = 0, also: Iterable[Compare] = ()) -> TxnResult:
    """The changes, as one transaction, if `also` holds as well. `lease`: what leased records hang on.

    A claim is looked up when its answer was lost (its record is like no other); whatever else is ambiguous raises
    EtcdError, and may be repeated: its compares hold once only.
    """
    compares = [c for change in changes for c in change.compares]
    puts = [p for change in changes for p in change.puts]
    ops: list[Op] = [put_op(p.key, p.value, lease if p.leased else 0) for p in puts]
    ops += [delete_op(k) for change in changes for k in change.deletes]
    made = [create_is(c.key, c.revision) if c.target == "create" else mod_is(c.key, c.revision) for c in compares]
    claims = [p.key for change in changes if change.outcome == "claimed" for p in change.puts if p.leased]
    return store.txn([*made, *also], ops, token=claims[0] if claims else None)


def claims_chunks(program: Program) -> bool:
    """True if a trainer's program claims what it works on: of the queue in etcd, or of a coordinator."""
    return any(program.find_op(name) is not None for name in ("etcd_get_chunk", "get_task"))


def give_back(
    store: Store,
    prefix: str,
    fences: Mapping[int, int],
    make: Callable[[int, KV], Change],
    also: Sequence[Compare] = (),
) -> list[Change]:
    """Carries out, as one transaction, what `make` makes of the todo records of claimed chunks, while `also` holds.

    `fences`: chunks, and the revisions of their claims. Claims that are somebody else's by now stay.
    """
    chunks = list(fences)
    while True:
        read = store.txn(
            also, [get_op(key(prefix, c)) for c in chunks for key in (chunk_queue.todo_key, chunk_queue.pending_key)]
        )
        changes = list[Change]()
        if not read.ok:
            return changes
        for i, chunk in enumerate(chunks):
            todo, pending = read.kv(2 * i), read.kv(2 * i + 1)
            if todo is not None and pending is not None and pending.create_revision == fences[chunk]:
                changes.append(make(chunk, todo))
        if not changes or commit(store, changes, also=also).ok:
            return changes


def renew(
    store: Store,
    prefix: str,
    chunk: int,
    fence: int,
    *,
    progress: int = 0,
    timeout: float,
    lease: int,
    also: Sequence[Compare] = (),
) -> bool:
    """Tells that the holder of a claim is at work, and how far it is. False: it holds it no more."""
    read = store.txn([], [get_op(chunk_queue.todo_key(prefix, chunk)), get_op(chunk_queue.pending_key(prefix, chunk))])
    todo, pending = read.kv(0), read.kv(1)
    if todo is None or pending is None or pending.create_revision != fence:
        return False
    record = msgspec.json.decode(pending.value, type=Pending)
    change = chunk_queue.renew(prefix, chunk, fence, record, todo, progress=progress, now=time.time(), timeout=timeout)
    return commit(store, [change], lease, also).ok


def tell_discarded(events: Events, pass_index: int, chunk: int, change: Change) -> None:
    """Whatever is discarded is named, and whatever ends the job."""
    if change.outcome == "discarded":
        events.emit("discarded", f"DISCARDED: {change.reason}", chunk=chunk, pass_index=pass_index)
    elif change.outcome == "job-failed":
        events.emit("failed", change.reason, chunk=chunk, pass_index=pass_index)


class Ages:
    """Tells since when records are as they are: on this process's own clock, since it saw them change. No two clocks
    are compared."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, kvs: Iterable[KV], now: float) -> dict[str, float]:
        """Returns the age of each record, by key."""
        seen = {kv.key: (kv.mod_revision, self._seen.get(kv.key, (0, now))) for kv in kvs}
        self._seen = {key: old if old[0] == revision else (revision, now) for key, (revision, old) in seen.items()}
        return {key: now - since for key, (_, since) in self._seen.items()}


class StaleClaims:
    """The second net below leases: takes away a claim whose holder lives, but makes no progress. The holder is barred
    in the same transaction: it does not take it back at once (`roles/bar.py`)."""

    def __init__(self, etcd: Store, keys: Keys, events: Events) -> None:
        self.etcd, self.keys, self.events = etcd, keys, events
        self._ages = Ages()
        self._next = 0.0

    def look(self, pass_index: int, timeout: float, held: Collection[int] = ()) -> None:
        """Takes away what was not renewed for `timeout` seconds.

        `held`: revisions of the own claims, which stay. What else bears the own name is a claim whose answer was lost.
        """
        prefix, now = self.keys.queue(pass_index), time.monotonic()
        if now < self._next:
            return
        self._next = now + timeout / LOOKS
        pending = self.etcd.range(f"{prefix}pending/").kvs
        ages = self._ages.look(pending, now)
        for kv in pending:
            if kv.create_revision not in held:
                self._check(prefix, kv, ages[kv.key], timeout)

    def _check(self, prefix: str, kv: KV, age: float, timeout: float) -> None:
        pending, chunk = msgspec.json.decode(kv.value, type=Pending), chunk_queue.chunk_of(kv.key)
        # The holder's clock as it can be told from here: when it wrote the record, and the time since.
        change = chunk_queue.expire(prefix, chunk, kv, pending.deadline - timeout + age)
        if change is None:
            return
        also = []
        if pending.slot >= 0:  # sync: with the chunk goes the slot
            slot = self.keys.slot(pending.slot)
            also = [value_is(slot, pending.trainer.encode())]
            change = dataclasses.replace(change, deletes=(*change.deletes, slot))
        reason = f"it made no progress with chunk {chunk} for {age:.0f} s"
        bar = msgspec.json.encode(Barred(reason, self.events.who))
        change = dataclasses.replace(change, puts=(Put(self.keys.barred(pending.trainer), bar, leased=True),))
        if commit(self.etcd, [change], kv.lease, also).ok:
            what = f"slot {pending.slot}" if pending.slot >= 0 else f"chunk {chunk}"
            self.events.emit(
                "stale-claim",
                f"{what} was taken from trainer {pending.trainer}: no progress for {age:.0f} s",
                chunk=chunk,
                slot=pending.slot,
                trainer=pending.trainer,
            )
