"""The records of passes: made when a pass begins, put back when a shard goes back, and closed at its end.

A chunk's holder may die, or lose the slot, after the last batch was applied and before it has completed the chunk. So
the trainer that begins a pass of a sync job completes what is open of the one before, and at the end of any job the
first shard does so for all passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import msgspec

from graphft.plan import Plan
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import PassRecord, decode
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import KV, get_op, mod_is, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change, ChunkDiscards
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.messages import RequeueTasks, TasksSettled
from graphft.runtime.queue.task_client import MAX_TASKS, TaskClient
from graphft.runtime.queue.transactions import commit

WAIT_SECONDS, MAX_WAIT_SECONDS = 0.2, 2.0
"""A trainer begins a pass so much later for each one before it in the order of their ids."""
CHANGES = 24
"""A transaction of etcd has at most 128 operations."""


class Passes:
    """Makes the records of passes, which count only when `/<job>/pass` says so: a crash half-way does no harm."""

    def __init__(self, member: Member) -> None:
        self.member, self.keys, self.plan = member, member.keys, member.config.plan

    def enqueue(
        self, index: int, due: Callable[[PassRecord | None], bool], before: Callable[[], None] = lambda: None
    ) -> bool:
        """Begins pass `index` as long as it is `due` after the one that is recorded; True if this process has done it.

        Calls `before`, makes the missing records and writes `/<job>/pass`. The trainers begin one after the other, so
        that the later ones find it done. `index` may be the number of passes: then nothing is left to do.
        """
        return self.member.retry_while_leased(functools.partial(self._enqueue, index, due, before))

    def _enqueue(self, index: int, due: Callable[[PassRecord | None], bool], before: Callable[[], None]) -> bool:
        rank = sum(trainer < self.member.id for trainer in self.member.view.trainers)
        kv = self.member.etcd.get(self.keys.pass_)
        if rank and due(decode(kv, PassRecord)):
            self.member.await_view(functools.partial(self._moved, kv), min(rank * WAIT_SECONDS, MAX_WAIT_SECONDS))
            kv = self.member.etcd.get(self.keys.pass_)
        while due(decode(kv, PassRecord)):
            before()
            if self._make_records(index, kv):
                return True
            kv = self.member.etcd.get(self.keys.pass_)
        return False

    def _moved(self, before: KV | None, kvs: Mapping[str, KV]) -> bool:
        return kvs.get(self.keys.pass_) not in (None, before)

    def _make_records(self, index: int, marker: KV | None) -> bool:
        """Writes what is missing of the pass. Every write compares the marker, so a late process changes nothing; the
        last one makes the pass count."""
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
        return commit(etcd, [*changes[-1:], Change("enqueued", (fence,), (put,))]).ok


def close_passes(etcd: Store, keys: Keys, plan: Plan, end: int) -> None:
    """Completes every chunk, also claimed ones, of a job whose last step is applied; deletes the records of passes
    behind `end`, the step at which it ends."""
    for index in range(plan.passes):
        if plan.start_steps[index + 1] <= end:
            close_pass(etcd, keys, plan, index, pending=True)
        elif etcd.count(keys.queue(index)):
            etcd.delete_prefix(keys.queue(index))


def close_pass(etcd: Store, keys: Keys, plan: Plan, index: int, pending: bool) -> None:
    """Completes what is open of a pass; with `pending`, also what trainers have claimed."""
    while changes := _changes(etcd, keys.queue(index), plan, index, pending):
        for some in (changes[i : i + CHANGES] for i in range(0, len(changes), CHANGES)):
            if not commit(etcd, some).ok:  # their holders complete some of them, at this moment
                for change in some:
                    commit(etcd, [change])


def _changes(etcd: Store, prefix: str, plan: Plan, index: int, pending: bool) -> list[Change]:
    records = {kv.key: kv for kv in etcd.range(prefix).kvs}
    chunks = [
        planned.chunk
        for planned in plan.chunks_of(index)
        if chunk_queue.todo_key(prefix, planned.chunk) in records
        and (pending or chunk_queue.pending_key(prefix, planned.chunk) not in records)
    ]
    return chunk_queue.close(prefix, chunks, records)


class Requeue:
    """Has chunks done again that an async shard lacks after it went back. Methods may be repeated after a crash."""

    def __init__(self, etcd: Store, keys: Keys, plan: Plan) -> None:
        self.etcd, self.keys, self.plan = etcd, keys, plan
        self.chunks = [c for c in range(len(plan.records)) if plan.batches[c]]

    def lacking(self, ledger: Ledger, pass_index: int) -> set[int]:
        """Returns the chunks of a pass of which `ledger` lacks batches that are not discarded."""
        lacking = set(ledger.lacking(pass_index, self.chunks))
        discarded = read_discards(self.etcd, self.keys) if lacking else {}
        for chunk in lacking & discarded.keys():
            gone = ChunkDiscards(self.plan, chunk, discarded[chunk]).batches(pass_index)
            batches = set(range(int(self.plan.batches[chunk]))) - gone
            if all(ledger.has(pass_index, chunk, batch) for batch in batches):
                lacking.remove(chunk)
        return lacking

    def run(self, ledger: Ledger) -> int:
        """Puts chunks back to todo that are done, or whose records are gone, but lacking in `ledger`; returns how many.

        Then `/<job>/pass` is written, as the lowest pass with such a chunk: trainers that found nothing to do look
        again, and one that began the next pass is overruled. What is todo or pending stays: its holder asks this shard
        for its ledger.
        """
        count, lowest = 0, self.plan.passes
        recorded = decode(self.etcd.get(self.keys.pass_), PassRecord)
        for index in range(min(recorded.pass_index + 1, self.plan.passes) if recorded is not None else 0):
            if lacking := self.lacking(ledger, index):
                count += self._requeue(ledger, index, lacking)
                lowest = min(lowest, index)
        if recorded is not None and (count or lowest < recorded.pass_index):
            self._lower(lowest)
        return count

    def _requeue(self, ledger: Ledger, index: int, lacking: set[int]) -> int:
        prefix = self.keys.queue(index)
        done = {chunk_queue.chunk_of(kv.key): kv for kv in self.etcd.range(f"{prefix}done/", keys_only=True).kvs}
        todo = {chunk_queue.chunk_of(kv.key) for kv in self.etcd.range(f"{prefix}todo/", keys_only=True).kvs}
        return sum(
            self._requeue_chunk(prefix, chunk, done.get(chunk), ledger.progress(index, chunk))
            for chunk in sorted(lacking - todo)
        )

    def _requeue_chunk(self, prefix: str, chunk: int, done: KV | None, progress: int) -> bool:
        """True if this call has done it: others may put the chunk back, or forget it, meanwhile."""
        while not commit(self.etcd, [chunk_queue.requeue(prefix, chunk, done, progress)]).ok:
            keys = (chunk_queue.todo_key(prefix, chunk), chunk_queue.done_key(prefix, chunk))
            read = self.etcd.txn([], [get_op(key) for key in keys])
            if read.kv(0) is not None:
                return False
            done = read.kv(1)
        return True

    def _lower(self, index: int) -> None:
        while True:
            kv = self.etcd.get(self.keys.pass_)
            recorded = decode(kv, PassRecord)
            assert kv is not None
            assert recorded is not None
            index = min(index, recorded.pass_index)
            record = PassRecord(index, len(self.chunks), self.plan.start_steps[index])
            if self.etcd.txn([mod_is(kv.key, kv.mod_revision)], [put_op(kv.key, msgspec.json.encode(record))]).ok:
                return


class RequeueByCoordinator(Requeue):
    """Tells a coordinator, which begins the pass anew itself."""

    def __init__(self, member: Member, client: TaskClient) -> None:
        super().__init__(member.etcd, member.keys, member.config.plan)
        self.member, self.client = member, client

    def _requeue(self, ledger: Ledger, index: int, lacking: set[int]) -> int:
        tasks = [(chunk, ledger.progress(index, chunk)) for chunk in sorted(lacking)]
        return sum(self._ask(index, tasks[i : i + MAX_TASKS]) for i in range(0, len(tasks), MAX_TASKS))

    def _ask(self, index: int, tasks: list[tuple[int, int]]) -> int:
        answer = self.client.call(RequeueTasks(0, self.member.id, index, tasks), TasksSettled)
        return len(tasks) - len(answer.refused) if answer is not None else 0

    def _lower(self, index: int) -> None:
        """The coordinator has done that."""
