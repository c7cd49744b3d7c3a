"""What shards tell the coordinator: which tasks are to do again, and that the last step is applied."""

from __future__ import annotations

import contextlib

from graphft.ops.context import WorkChanged
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.messages import CloseTasks, RequeueTasks, TasksSettled
from graphft.runtime.queue.requeue import Requeue
from graphft.runtime.queue.task_client import MAX_TASKS, TaskClient


class RequeueByCoordinator(Requeue):
    """In the place of `Requeue`, where a coordinator has the queue. It begins the pass anew itself."""

    def __init__(self, member: Member, client: TaskClient) -> None:
        super().__init__(member.etcd, member.keys, member.config.plan)
        self.member, self.client = member, client

    def _requeue(self, ledger: Ledger, index: int, lacking: set[int]) -> int:
        tasks = [(chunk, ledger.progress(index, chunk)) for chunk in sorted(lacking)]
        return sum(self._ask(index, tasks[i : i + MAX_TASKS]) for i in range(0, len(tasks), MAX_TASKS))

    def _ask(self, index: int, tasks: list[tuple[int, int]]) -> int:
        """How many are to do because of this shard; others were todo, or pending, already."""
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
