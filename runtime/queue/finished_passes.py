"""The records of passes that the job is through with: closed, so that none stays open, and at last deleted.

A chunk is done when its holder says so. Its holder may die, or lose the slot, between the last batch's application and
that; and who takes the slot goes on behind the chunk. So when a pass of a sync job is over, what its plan has is
recorded as done by the trainer that begins the next one. At the end of any job, the first shard does it for all passes,
before it says that the job is complete: then all shards have applied all that is not left out; trainers may be gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphft.plan import Plan
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.queue.background_tasks import BackgroundTasks
from graphft.runtime.queue.transactions import commit

CHANGES = 24
"""A transaction of etcd has at most 128 operations."""


class FinishedPasses:
    """Used by the trainer's main thread; what need not be awaited is left to `background`."""

    def __init__(self, member: Member, lowest: Callable[[], int], background: BackgroundTasks) -> None:
        """`lowest`: gives the lowest version among the shards."""
        self.member, self.keys, self.plan, self.lowest = member, member.keys, member.config.plan, lowest
        self._background = background
        self._kept = 0
        """The first pass whose records this process has not deleted."""

    def close_before(self, index: int) -> None:
        """Closes the passes before `index` that every shard has applied, but for what living trainers have claimed.

        These complete it themselves. If one of them dies before it does, the next pass that begins closes it.
        """
        for old in range(max(self._kept, index - 2), index):
            if self.lowest() >= self.plan.start_steps[old + 1]:
                _close(self.member.etcd, self.keys, self.plan, old, pending=False)

    def forget_before(self, index: int) -> None:
        """Deletes the records of passes before the last two, but of none that the job may go back to."""
        committed = self.member.view.committed
        saved = self.plan.pass_of(committed.step) if committed is not None else 0
        old, self._kept = self._kept, max(self._kept, min(index - 1, saved))
        for gone in range(old, self._kept):
            self._background.run(
                functools.partial(
                    self.member.retry_while_leased, functools.partial(self._delete, self.keys.queue(gone))
                )
            )

    def _delete(self, prefix: str) -> None:
        self.member.etcd.delete_prefix(prefix)


def close_passes(etcd: Store, keys: Keys, plan: Plan, end: int) -> None:
    """The job's last step is applied: every chunk is done, also one that is claimed. Of passes that a job does not come
    to the end of, since it ends at step `end`, nothing is left to do."""
    for index in range(plan.passes):
        if plan.start_steps[index + 1] <= end:
            _close(etcd, keys, plan, index, pending=True)
        elif etcd.count(keys.queue(index)):
            etcd.delete_prefix(keys.queue(index))


def _close(etcd: Store, keys: Keys, plan: Plan, index: int, pending: bool) -> None:
    """Looks again after each try: a record that a holder changed meanwhile is judged by what it says now."""
    while changes := _changes(etcd, keys.queue(index), plan, index, pending):
        for some in (changes[i : i + CHANGES] for i in range(0, len(changes), CHANGES)):
            if not commit(etcd, some).ok:  # their holders complete some of them, at this moment
                for change in some:
                    commit(etcd, [change])


def _changes(etcd: Store, prefix: str, plan: Plan, index: int, pending: bool) -> list[Change]:
    """What is to be recorded as done; with `pending`, also what a trainer has claimed."""
    if not etcd.count(f"{prefix}todo/"):
        return []
    records = {kv.key: kv for kv in etcd.range(prefix).kvs}
    chunks = [
        planned
        for planned in plan.chunks_of(index)
        if chunk_queue.todo_key(prefix, planned.chunk) in records
        and (pending or chunk_queue.pending_key(prefix, planned.chunk) not in records)
    ]
    return chunk_queue.rewind(prefix, chunks, plan.start_steps[index + 1], records)
