"""The records of a pass: made when it begins, and closed when the job is through with it, so that none stays open.

A chunk is done when its holder says so. Its holder may die, or lose the slot, between the last batch's application and
that; and who takes the slot goes on behind the chunk. So when a pass of a sync job is over, what its plan has is
recorded as done by the trainer that begins the next one. At the end of any job, the first shard does it for all passes,
before it says that the job is complete: then all shards have applied all that is not discarded; trainers may be gone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import msgspec

from graphft.plan import Plan
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import PassRecord, decode_pass
from graphft.runtime.etcd import KV, absent, delete_op, get_op, mod_is, put_op, value_is
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.queue.transactions import commit

WAIT_SECONDS = 0.2
LOCK_SECONDS = 10.0
"""For which a lock is respected. It only saves work: each write compares the pass's record. (An etcd that was restored
from a backup may have one again whose holder lives, and knows nothing of it.)"""
CHANGES = 24
"""A transaction of etcd has at most 128 operations."""


class Passes:
    """Makes the records of passes. A crash half-way does no harm: they count only when `/<job>/pass` says so."""

    def __init__(self, member: Member) -> None:
        self.member, self.keys, self.plan = member, member.keys, member.config.plan
        self._lock_key = f"{self.keys.queues}enqueuer"

    def enqueue(
        self, index: int, due: Callable[[PassRecord | None], bool], before: Callable[[], None] = lambda: None
    ) -> bool:
        """Makes pass `index` the one that is worked on, as long as it is `due` after what is recorded now.

        One trainer at a time tries: `before` is called by it, then the missing records are made, and `/<job>/pass`.
        True if it was this process. `index` may be the number of passes: nothing is left to be done then.
        """
        return self.member.retry_while_leased(functools.partial(self._enqueue, index, due, before))

    def _enqueue(self, index: int, due: Callable[[PassRecord | None], bool], before: Callable[[], None]) -> bool:
        etcd, lock, me = self.member.etcd, self._lock_key, self.member.id.encode()
        seen, since = 0, 0.0
        while True:
            kv = etcd.get(self.keys.pass_)
            if not due(decode_pass(kv)):
                return False
            holder = self._lock(lock, me)
            if holder is not None:
                if holder.mod_revision != seen:
                    seen, since = holder.mod_revision, time.monotonic()
                elif time.monotonic() - since > LOCK_SECONDS:
                    etcd.txn([mod_is(lock, seen)], [delete_op(lock)])
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

    def _lock(self, lock: str, me: bytes) -> KV | None:
        """Takes the lock. Returns None if this process has it, maybe since a try that etcd did not answer; else whose
        lock it is."""
        result = self.member.etcd.txn([absent(lock)], [put_op(lock, me, self.member.lease)], [get_op(lock)], token=lock)
        holder = result.kv(0) if not result.ok else None
        return holder if holder is not None and holder.value != me else None

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


def close_passes(etcd: Store, keys: Keys, plan: Plan, end: int) -> None:
    """The job's last step is applied: every chunk is done, also one that is claimed. Of passes that a job does not come
    to the end of, since it ends at step `end`, nothing is left to do."""
    for index in range(plan.passes):
        if plan.start_steps[index + 1] <= end:
            close_pass(etcd, keys, plan, index, pending=True)
        elif etcd.count(keys.queue(index)):
            etcd.delete_prefix(keys.queue(index))


def close_pass(etcd: Store, keys: Keys, plan: Plan, index: int, pending: bool) -> None:
    """Looks again after each try: a record that a holder changed meanwhile is judged by what it says now."""
    while changes := _changes(etcd, keys.queue(index), plan, index, pending):
        for some in (changes[i : i + CHANGES] for i in range(0, len(changes), CHANGES)):
            if not commit(etcd, some).ok:  # their holders complete some of them, at this moment
                for change in some:
                    commit(etcd, [change])


def _changes(etcd: Store, prefix: str, plan: Plan, index: int, pending: bool) -> list[Change]:
    """Returns what is to be recorded as done; with `pending`, also what a trainer has claimed."""
    if not etcd.count(f"{prefix}todo/"):
        return []
    records = {kv.key: kv for kv in etcd.range(prefix).kvs}
    chunks = [
        planned.chunk
        for planned in plan.chunks_of(index)
        if chunk_queue.todo_key(prefix, planned.chunk) in records
        and (pending or chunk_queue.pending_key(prefix, planned.chunk) not in records)
    ]
    return chunk_queue.close(prefix, chunks, records)
