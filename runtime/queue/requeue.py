"""Tells the queue what shards know: chunks that an async one lacks when it comes back older are to be done again; a
coordinator is told when the last step is applied."""

from __future__ import annotations

import contextlib

import msgspec

from graphft.ops.context import WorkChanged
from graphft.plan import Plan
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import PassRecord, decode_pass
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import KV, get_op, mod_is, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.discards import ChunkDiscards, Discards
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.messages import CloseTasks, RequeueTasks, TasksSettled
from graphft.runtime.queue.task_client import MAX_TASKS, TaskClient
from graphft.runtime.queue.transactions import commit


class Requeue:
    """One shard's view of the queue's records. Every method may be repeated after any crash."""

    def __init__(self, etcd: Store, keys: Keys, plan: Plan) -> None:
        self.etcd, self.keys, self.plan = etcd, keys, plan
        self.chunks = [c for c in range(len(plan.records)) if plan.batches[c]]

    def lacking(self, ledger: Ledger, pass_index: int) -> list[int]:
        """Chunks of a pass that are not wholly applied according to `ledger`."""
        return ledger.lacking(pass_index, self.chunks)

    def discarded(self, ledger: Ledger, pass_index: int) -> set[int]:
        """Chunks of a pass of which `ledger` has all that is not discarded, and not more."""
        found = read_discards(self.etcd, self.keys)
        return {chunk for chunk, what in found.items() if self._has_rest(ledger, pass_index, chunk, what)}

    def _has_rest(self, ledger: Ledger, pass_index: int, chunk: int, what: Discards) -> bool:
        discarded = ChunkDiscards(self.plan, chunk, what).batches(pass_index)
        batches = set(range(int(self.plan.batches[chunk]))) - discarded
        return all(ledger.has(pass_index, chunk, batch) for batch in batches)

    def run(self, ledger: Ledger) -> int:
        """Puts every chunk back to todo that is done (or forgotten), but not in `ledger`; returns how many.

        Then `/<job>/pass` is written, as the lowest pass that has such a chunk: trainers that found nothing to do look
        again, and one that went on to the next pass meanwhile is overruled. What is todo or pending already stays as
        it is: its holder asks this shard for its ledger.
        """
        count, lowest = 0, self.plan.passes
        recorded = decode_pass(self.etcd.get(self.keys.pass_))
        for index in range(min(recorded.pass_index + 1, self.plan.passes) if recorded is not None else 0):
            lacking = self.lacking(ledger, index)
            left = set(lacking) - self.discarded(ledger, index) if lacking else set()
            if left:
                count += self._requeue(ledger, index, left)
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
        """True if it was this call that did it. What is done may be forgotten, or put back by others, meanwhile."""
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
            recorded = decode_pass(kv)
            assert kv is not None
            assert recorded is not None
            index = min(index, recorded.pass_index)
            record = PassRecord(index, len(self.chunks), self.plan.start_steps[index])
            if self.etcd.txn([mod_is(kv.key, kv.mod_revision)], [put_op(kv.key, msgspec.json.encode(record))]).ok:
                return


class RequeueByCoordinator(Requeue):
    """In the place of `Requeue`, where a coordinator has the queue. It begins the pass anew itself."""

    def __init__(self, member: Member, client: TaskClient) -> None:
        super().__init__(member.etcd, member.keys, member.config.plan)
        self.member, self.client = member, client

    def _requeue(self, ledger: Ledger, index: int, lacking: set[int]) -> int:
        tasks = [(chunk, ledger.progress(index, chunk)) for chunk in sorted(lacking)]
        return sum(self._ask(index, tasks[i : i + MAX_TASKS]) for i in range(0, len(tasks), MAX_TASKS))

    def _ask(self, index: int, tasks: list[tuple[int, int]]) -> int:
        """Returns the number of those that are to do because of this shard; others were todo, or pending, already."""
        try:
            answer = self.client.call(lambda n: RequeueTasks(n, self.member.id, index, tasks), TasksSettled)
        except WorkChanged:
            return 0  # the job is over
        return len(tasks) - len(answer.refused)

    def _lower(self, index: int) -> None:
        """The coordinator has done that."""


def close_tasks(client: TaskClient, trainer: str) -> None:
    """Nothing is left to do: no trainer is given a task any more."""
    with contextlib.suppress(WorkChanged):  # the job is over: this was said before
        client.call(lambda n: CloseTasks(n, trainer), TasksSettled)
