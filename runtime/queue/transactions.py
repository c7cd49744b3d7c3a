"""The chunk queue's records in etcd: the protocol's transitions carried out, and the records of a pass made."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from graphft import registry
from graphft.ir import Operator, Program
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import PassRecord, decode_pass
from graphft.runtime.etcd import KV, absent, create_is, delete_op, get_op, mod_is, put_op, value_is
from graphft.runtime.etcd.model import Compare, Op, Store, Transactions, TxnResult
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change

log = logging.getLogger("graphft")

WAIT_SECONDS = 0.2


def commit(store: Transactions, changes: Sequence[Change], lease: int = 0, also: Iterable[Compare] = ()) -> TxnResult:
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


class Terms(NamedTuple):
    """Of claims, as op `etcd_get_chunk` has them: see there."""

    timeout: float = math.inf
    max_failures: int = 0
    max_discarded: int = 0


def terms_of(op: Operator | None) -> Terms:
    """The terms of claims that an op `etcd_get_chunk` makes; without one, claims are for ever."""
    return Terms(*(registry.attr(op, name) for name in Terms._fields)) if op is not None else Terms()


def claims_chunks(program: Program) -> bool:
    """Whether a trainer's program claims what it works on: of the queue in etcd, or of a coordinator."""
    return any(program.find_op(name) is not None for name in ("etcd_get_chunk", "get_task"))


def give_back(store: Store, prefix: str, fences: Mapping[int, int], make: Callable[[int, KV], Change]) -> list[Change]:
    """Carries out, as one transaction, what `make` makes of the todo records of claimed chunks.

    `fences`: chunks, and the revisions of their claims. Claims that are somebody else's by now are left out.
    """
    chunks = list(fences)
    while True:
        read = store.txn(
            [], [get_op(key(prefix, c)) for c in chunks for key in (chunk_queue.todo_key, chunk_queue.pending_key)]
        )
        changes = []
        for i, chunk in enumerate(chunks):
            todo, pending = read.kv(2 * i), read.kv(2 * i + 1)
            if todo is not None and pending is not None and pending.create_revision == fences[chunk]:
                changes.append(make(chunk, todo))
        if not changes or commit(store, changes).ok:
            return changes


def renew(store: Store, prefix: str, chunk: int, fence: int, *, progress: int, timeout: float, lease: int) -> None:
    """Tells that the holder of a claim is at work, and how far it is; does nothing if it holds it no more."""
    read = store.txn([], [get_op(chunk_queue.todo_key(prefix, chunk)), get_op(chunk_queue.pending_key(prefix, chunk))])
    todo, pending = read.kv(0), read.kv(1)
    if todo is not None and pending is not None and pending.create_revision == fence:
        record = msgspec.json.decode(pending.value, type=chunk_queue.Pending)
        commit(
            store,
            [
                chunk_queue.renew(
                    prefix, chunk, fence, record, todo, progress=progress, now=time.time(), timeout=timeout
                )
            ],
            lease,
        )


def tell_left_out(events: Events, pass_index: int, chunk: int, change: Change) -> None:
    """Whatever is left out is named, and whatever ends the job."""
    if change.outcome == "left-out":
        events.emit("left-out", f"DISCARDED: {change.reason}", chunk=chunk, pass_index=pass_index)
    elif change.outcome == "job-failed":
        events.emit("failed", change.reason, chunk=chunk, pass_index=pass_index)


class Passes:
    """Makes the records of passes. A crash half-way does no harm: they count only when `/<job>/pass` says so."""

    def __init__(self, member: Member) -> None:
        self.member, self.keys, self.plan = member, member.keys, member.config.plan
        self._lock_key = f"{self.keys.queues}enqueuer"
        self._trying = False
        self._next_look = 0.0

    def enqueue(self, index: int, due: Callable[[PassRecord | None], bool], before: Callable[[], None]) -> bool:
        """Makes pass `index` the one that is worked on, as long as it is `due` after what is recorded now.

        One trainer at a time tries: `before` is called by it, then the missing records are made, and `/<job>/pass`.
        Returns whether it was this process. `index` may be the number of passes: nothing is left to be done then.
        """
        self._trying = True
        try:
            return self.member.retry_while_leased(functools.partial(self._enqueue, index, due, before))
        finally:
            self._trying = False

    def let_go(self, seconds: float) -> None:
        """Deletes the lock if it bears this process's name while it does not try: an etcd that was restored from a
        backup has it again, with a lease that lives, and all others would wait for it. Looks every so many seconds.
        From any thread: one that is taken meanwhile stays."""
        now, etcd = time.monotonic(), self.member.etcd
        if self._trying or now < self._next_look:
            return
        self._next_look = now + seconds
        kv = etcd.get(self._lock_key)
        if kv is None or kv.value != self.member.id.encode() or self._trying:
            return
        if etcd.txn([mod_is(self._lock_key, kv.mod_revision)], [delete_op(self._lock_key)]).ok:
            log.warning(
                "the lock of the queue bore this trainer's name, and is let go: was etcd restored from a backup?"
            )

    def _enqueue(self, index: int, due: Callable[[PassRecord | None], bool], before: Callable[[], None]) -> bool:
        etcd, lock, me = self.member.etcd, self._lock_key, self.member.id.encode()
        while True:
            kv = etcd.get(self.keys.pass_)
            if not due(decode_pass(kv)):
                return False
            if not self._lock(lock, me):
                self.member.await_view(functools.partial(self._moved, kv), WAIT_SECONDS)
                self.member.check_lease()
                self.member.progress.beat()
                continue
            made = False
            try:
                before()
                made = self._make_records(index, kv, lock)
                if made:
                    return True
            finally:
                if not made:
                    etcd.txn([value_is(lock, me)], [delete_op(lock)])

    def _moved(self, before: KV | None, kvs: Mapping[str, KV]) -> bool:
        return kvs.get(self.keys.pass_) not in (None, before)

    def _lock(self, lock: str, me: bytes) -> bool:
        """Whether the lock is this process's; also if it is since an earlier try, whose end etcd did not answer."""
        result = self.member.etcd.txn([absent(lock)], [put_op(lock, me, self.member.lease)], [get_op(lock)], token=lock)
        if result.ok:
            return True
        holder = result.kv(0)
        return holder is not None and holder.value == me

    def _make_records(self, index: int, marker: KV | None, lock: str) -> bool:
        """Writes what is missing of the pass. Every write compares the marker: a late process changes nothing.

        The last write, in a pass of some chunks the only one, makes the pass count, and gives the lock back.
        """
        etcd, prefix, key = self.member.etcd, self.keys.queue(index), self.keys.pass_
        revision = marker.mod_revision if marker is not None else 0
        chunks = [c for c in range(len(self.plan.records)) if self.plan.batches[c]] if index < self.plan.passes else []
        fence, changes = chunk_queue.Compare(key, "mod", revision), list[Change]()
        if chunks:
            there = {chunk_queue.chunk_of(kv.key) for kv in etcd.range(prefix, keys_only=True).kvs}
            todo = [c for c in chunks if c not in there]
            changes = chunk_queue.enqueue(prefix, todo, fence)
        for change in changes[:-1]:
            if not commit(etcd, [change]).ok:
                return False
        record = PassRecord(index, len(chunks), self.plan.start_steps[index])
        put = chunk_queue.Put(key, msgspec.json.encode(record))
        begin = Change("enqueued", f"pass {index} begins", (fence,), (put,), (lock,))
        return commit(etcd, [*changes[-1:], begin], also=[value_is(lock, self.member.id.encode())]).ok
