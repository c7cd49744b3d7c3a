"""A training loop of the user's own that gets its tasks from a job's coordinator."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from graphft.errors import UsageError
from graphft.ops.context import WorkChanged
from graphft.runtime.coordination.connect import connect
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import LeaseLost, Session, put_op
from graphft.runtime.process.progress import Progress
from graphft.runtime.protocol.left_out import ChunkOmissions
from graphft.runtime.protocol.messages import (
    FinishTasks,
    GetTasks,
    ReleaseTasks,
    RenewTasks,
    RequestSaveModel,
    SaveModelAnswer,
    Tasks,
    TasksSettled,
)
from graphft.runtime.protocol.task_checks import MAX_SECONDS
from graphft.runtime.queue.failed_task import fail_task
from graphft.runtime.queue.task_client import MAX_TASKS, TaskClient

MAX_HELD = 16384
"""Tasks that a loop may hold at a time."""


class LoopTask(NamedTuple):
    """A chunk of the job's data, to be done in this pass. `attempt`: a number that no other attempt has. `without`:
    positions in the chunk of records that are left out of it."""

    pass_index: int
    chunk: int
    attempt: int
    without: frozenset[int] = frozenset()


class TaskLoop:
    """One trainer of your own, of an async job with `dispatch="coordinator"`: it asks the coordinator for tasks, as the
    EDL design's trainers ask their master, and does with them what it likes.

        with graphft.TaskLoop("jobs/mine", etcd="host:2379") as tasks:
            while (found := tasks.get(16)) is not None:      # None: all passes are done
                for task in found:                           # []: others hold what is left; ask again a little later
                    train_on(task.chunk)
                tasks.finish(found)
            if tasks.request_save_model(60):
                torch.save(...)

    It is registered under a lease: when it dies, or is not heard of for `chunk_timeout`, its tasks are given to others.
    Each call waits for the coordinator that serves, also across the death of one, and is never carried out twice.
    Raises UsageError for a job that has no such coordinator, or whose pservers run (they would wait for what this loop
    does), LeaseLost when it was taken for dead.

    `job`: the job's folder, or the Job. `etcd`: `host:port[,host:port...]`. Not for several threads.
    """

    def __init__(self, job: str | os.PathLike[str] | Any, etcd: str) -> None:
        from graphft.transpiler import Job

        self.job = job if isinstance(job, Job) else Job.load(Path(job))
        if self.job.config.sync or self.job.config.dispatch != "coordinator":
            raise UsageError(
                f"job {self.job.config.name!r} gives no tasks to loops of others",
                rule="task-loop",
                help="transpile with ft=True, sync=False, dispatch=\"coordinator\": a sync job's tasks are its slots'",
            )
        store = connect(etcd)
        put_job(store, Keys(self.job.config.name), self.job)
        self.member = Member("trainer", 0, store, self.job, Progress())
        self.member.session = Session(self.member.etcd, self.job.config.lease_ttl).run_thread()
        self._client = TaskClient(self.member)
        self.member.wake = self._client.wake
        self._pass, self._known = 0, 0
        self._held: set[LoopTask] = set()
        record = msgspec.json.encode(self.member.registration())
        key = self.member.keys.trainer(self.member.id)
        self.member.etcd.txn([], [put_op(key, record, self.member.lease)], token=key)

    def get(self, count: int = 1) -> list[LoopTask] | None:
        """About `count` tasks, or fewer; [] while others hold what is left; None: all passes are done. Raises
        UsageError when it would hold more than 16,384."""
        held = len(self._held)
        if count < 1 or held + count > MAX_HELD:
            raise UsageError(
                f"get({count}): 1 or more can be asked for, and {MAX_HELD:,} be held at most; {held:,} are held now",
                rule="task-loop",
                help="finish what is held before",
            )
        if self.member.view.pservers:
            raise UsageError(
                f"pservers of job {self.job.config.name!r} run, which would wait for what this loop does",
                rule="task-loop",
                help="start coordinators only: graphft start coordinator --job DIR --etcd ...",
            )
        while self._pass < self.job.config.passes:
            try:
                found = self._client.call(lambda n: GetTasks(n, self.member.id, self._pass, count), Tasks)
            except WorkChanged:  # the job is over
                return None
            self._known = found.call
            if found.pass_index == self._pass:
                return self._take(found)
            self._pass = found.pass_index
        return None

    def _take(self, found: Tasks) -> list[LoopTask]:
        plan = self.job.config.plan
        left_out = {chunk: ChunkOmissions(plan, chunk, what).records(self._pass) for chunk, what in found.left_out}
        tasks = [LoopTask(self._pass, c, attempt, left_out.get(c, frozenset())) for c, attempt in found.tasks]
        self._held.update(tasks)
        return tasks

    def finish(self, tasks: Sequence[LoopTask]) -> list[LoopTask]:
        """These are done. Returns those that were others' by then: what was done of them is done again."""
        lost: list[LoopTask] = []
        for index in sorted({task.pass_index for task in tasks}):
            some = [task for task in tasks if task.pass_index == index]
            told = FinishTasks(0, self.member.id, index, [(task.chunk, task.attempt) for task in some])
            refused = self._tell(told)
            lost += [task for task in some if task.chunk in refused]
        self._held.difference_update(tasks)
        return lost

    def _tell(self, call: FinishTasks | ReleaseTasks) -> list[int]:
        """Chunks that are others' by now; none of a job that is over."""
        refused: list[int] = []
        with contextlib.suppress(WorkChanged):
            for i in range(0, len(call.tasks), MAX_TASKS):
                part = msgspec.structs.replace(call, tasks=call.tasks[i : i + MAX_TASKS])
                refused += self._client.call(functools.partial(_numbered, part), TasksSettled).refused
        return refused

    def fail(self, task: LoopTask, reason: str, batch: int = 0) -> None:
        """This task cannot be done: it is given out again, and left out when it has failed `max_failures` times."""
        fail_task(self._client, task.pass_index, task.chunk, task.attempt, batch, reason)
        self._held.discard(task)

    def renew(self) -> None:
        """Says that the tasks that are held are worked on; to be called some times in `chunk_timeout`, if one takes so
        long."""
        tasks = [(task.pass_index, task.chunk, task.attempt, 0) for task in self._held]
        self._client.cast(lambda _: RenewTasks(self._known, self.member.id, tasks))

    def request_save_model(self, seconds: float) -> bool:
        """Whether this trainer is the one that is to save the model now; no other one is for so many seconds, a day at
        most."""
        if not 0 < seconds <= MAX_SECONDS:
            raise UsageError(
                f"request_save_model({seconds}): expected the seconds that saving may take",
                rule="task-loop",
                help=f"more than 0, at most {MAX_SECONDS:.0f}",
            )
        answer = self._client.call(lambda n: RequestSaveModel(n, self.member.id, seconds), SaveModelAnswer)
        return answer.granted

    def close(self) -> None:
        """Gives back what it holds, and leaves. Without a coordinator it waits for some seconds: what it holds is free
        when its lease ends."""
        self._client.leaving = True
        for index in sorted({task.pass_index for task in self._held}):
            held = [(task.chunk, task.attempt, 0) for task in self._held if task.pass_index == index]
            with contextlib.suppress(LeaseLost):
                self._tell(ReleaseTasks(0, self.member.id, index, held))
        self._held.clear()
        self._client.close()
        self.member.close()

    def __enter__(self) -> TaskLoop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _numbered(call: FinishTasks | ReleaseTasks, number: int) -> FinishTasks | ReleaseTasks:
    return msgspec.structs.replace(call, call=number)
