"""The old way, to measure against: a coordinator that writes its whole state as one value at each change.

The loop, the machine and the lock are the real coordinator's. But each call has a transaction of its own, and what that
writes is every task of the queue, as JSON under one key: it has to fit into etcd's 1.5 MB.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from dispatch_rig import Cluster

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import Etcd, put_op
from graphft.runtime.etcd.model import Op
from graphft.runtime.protocol.messages import TASK_CALLS
from graphft.runtime.protocol.task_events import Changes
from graphft.runtime.protocol.task_queue import TaskQueue
from graphft.runtime.roles.coordinator.coordinator import TaskCoordinator
from graphft.runtime.roles.coordinator.task_server import TaskServer
from graphft.runtime.roles.coordinator.task_store import TaskStore
from graphft.transpiler.job import Job


class WholeStateStore(TaskStore):
    """Saves everything at each change."""

    def ops(self, queue: TaskQueue, changes: Changes) -> tuple[list[Op], list[Op]]:
        tasks = {
            p: [
                {"chunk": chunk, "done": bool(t.done[chunk]), "task": t.open.get(chunk)} for chunk in range(len(t.done))
            ]
            for p, t in queue.passes.items()
        }
        _, heads = super().ops(queue, Changes([], changes.counts, changes.state, changes.marker, changes.saver, []))
        return [put_op(self.keys.all_tasks + "whole", msgspec.json.encode(tasks))], heads


class WholeStateServer(TaskServer):
    """Saves after each call."""

    def _round(self, calls: Sequence[tuple[bytes, TASK_CALLS]]) -> None:
        for call in calls:
            super()._round([call])
        if not calls:
            super()._round(calls)


def serve(folder: str, endpoints: list[str]) -> None:
    """The coordinator's process."""
    os.dup2(os.open(str(Path(folder, "logs", "whole-state")), os.O_WRONLY | os.O_CREAT), 2)
    job, etcd = Job.load(folder), Etcd(endpoints)
    put_job(etcd, Keys(job.config.name), job, Path(folder))
    role = TaskCoordinator(job, Path(folder), job.coordinator_program(), etcd, 0)
    assert role.member.session is not None
    role.server = WholeStateServer(role.member, role.member.session, role.transport, role.end)
    role.server.store = WholeStateStore(role.member, role.server.lock)
    role.ctx.task_server = role.server
    role.run()


class WholeStateCluster(Cluster):
    """The job's records, and its one coordinator of the old way, which serves."""

    def __enter__(self) -> WholeStateCluster:
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(str(self.folder), self.endpoints), daemon=True)
        self.process.start()
        self.await_view(lambda view: view.coordinator is not None)
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.join()
        super().__exit__(None, None, None)
