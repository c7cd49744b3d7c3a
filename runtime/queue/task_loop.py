"""A training loop of the user's own that gets its tasks from a job's coordinator."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from graphft.errors import UsageError
from graphft.runtime.coordination.connect import check_note, connect, note_etcd
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.runs import find_folder
from graphft.runtime.data import Reader, open_reader
from graphft.runtime.etcd import LeaseLost, Session, put_op
from graphft.runtime.process.progress import Progress
from graphft.runtime.protocol.messages import (
    TASK_ANSWERS,
    TASK_CALLS,
    CloseTasks,
    GetTasks,
    RequestSaveModel,
    SaveModelAnswer,
    Tasks,
    TasksSettled,
)
from graphft.runtime.protocol.task_events import MAX_SECONDS
from graphft.runtime.queue.chunk_queue import Claim
from graphft.runtime.queue.coordinator_queue import CoordinatorQueue
from graphft.runtime.queue.task_client import MAX_TASKS, TaskClient, fail_task
from graphft.transpiler.job import Job

A = TypeVar("A", bound=TASK_ANSWERS)


class LoopTask(NamedTuple):
    """A chunk of the job's data, to be done in this pass. `attempt`: a number that no other attempt has. `without`:
    positions in the chunk of records that are discarded of it, in the order of the data."""

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
                    for batch in tasks.batches(task):        # {"x": tensor, "y": tensor}
                        train_on(**batch)
                tasks.finish(found)
            if tasks.request_save_model(60):
                torch.save(...)

    It is registered under a lease: when it dies, or is not heard of for `chunk_timeout`, its tasks are given to others.
    Each call waits for the coordinator that serves, also across the death of one (that it waits is logged), and is
    never carried out twice. The job is complete when all passes are done, and the last loop that was told so has left
    its `with` block without an exception. If the one that was to save the model dies, or has one, the job waits for it:
    start it again.

    Raises UsageError for a job that has no such coordinator, or whose pservers run (they would wait for what this loop
    does), for one that is at work in another etcd, and for arguments that cannot be. Calls raise GraphftError when the
    job has failed, and LeaseLost when this loop was taken for dead.

    `job`: the job's folder, or the Job. `etcd`: `host:port[,host:port...]`. Not for several threads.
    """

    def __init__(self, job: str | os.PathLike[str] | Any, etcd: str) -> None:
        self._folder = None if isinstance(job, Job) else find_folder(job)
        self.job = job if isinstance(job, Job) else Job.load(find_folder(job))
        if self.job.config.sync or self.job.config.dispatch != "coordinator":
            raise UsageError(
                f"job {self.job.config.name!r} gives no tasks to loops of others",
                rule="task-loop",
                help="transpile with ft=True, sync=False, dispatch=\"coordinator\": a sync job's tasks are its slots'",
            )
        store = connect(etcd)
        try:
            keys = Keys(self.job.config.name)
            if self._folder is not None:
                check_note(self._folder, keys, self.job.run_id, store)
            put_job(store, keys, self.job)
            if self._folder is not None:
                note_etcd(self._folder, store)
        except BaseException:
            store.close()
            raise
        self.member = Member("trainer", 0, store, self.job, Progress())
        self.member.session = Session(self.member.etcd, self.job.config.lease_ttl).run_thread()
        self._client = TaskClient(self.member)
        self.member.wake = self._client.wake
        self._queue = CoordinatorQueue(self.member, self._client)
        self._pass, self._renewed = 0, time.monotonic()
        self._reader: Reader | None = None
        self._open, self._done = True, False
        record = msgspec.json.encode(self.member.registration())
        key = self.member.keys.trainer(self.member.id)
        self.member.etcd.txn([], [put_op(key, record, self.member.lease)], token=key)

    # -- tasks ----------------------------------------------------------------------------------------------------

    def get(self, count: int = 1) -> list[LoopTask] | None:
        """Returns about `count` tasks, or fewer; [] while others hold what is left; None: all passes are done. Raises
        UsageError when it would hold more than 4,096, or pservers run; GraphftError when the job has failed."""
        self._check_open()
        held = len(self._queue.held)
        if not 1 <= count <= MAX_TASKS - held:
            raise _wrong(f"get({count!r}): {held:,} of at most {MAX_TASKS:,} are held", "finish what is held before")
        if self.member.view.pservers:
            raise UsageError(
                f"pservers of job {self.job.config.name!r} run, which would wait for what this loop does",
                rule="task-loop",
                help="start coordinators only: graphft start coordinator --job DIR --etcd ...",
            )
        self._renew_in_time()
        while self._pass < self.job.config.epochs:
            found = self._call(GetTasks(0, self.member.id, self._pass, count), Tasks)
            if found is None:  # the job is complete
                break
            tasks = self._take(found)
            if found.pass_index != self._pass:
                self._pass = found.pass_index
            elif tasks or not found.tasks:
                return tasks
        self._done = True
        return None

    def _take(self, found: Tasks) -> list[LoopTask]:
        """Returns the tasks, and finishes those of which nothing is left."""
        tasks, records = [], self.job.config.plan.records
        for claim in self._queue.given(self._pass, found):
            without = claim.discards.records(self._pass) if claim.discards is not None else frozenset[int]()
            tasks.append(LoopTask(*claim.key, claim.revision, without))
        if empty := [task for task in tasks if len(task.without) >= records[task.chunk]]:
            self.finish(empty)
        return [task for task in tasks if task not in empty]

    def batches(self, task: LoopTask) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the task's data by column, in batches of `batch_size` records, in the order of its pass, without what
        is discarded: the same bits in every process. Raises GraphftError when they cannot be read, and UsageError for a
        loop that was given no folder."""
        config = self.job.config
        if self._reader is None:
            if self._folder is None:
                raise _wrong("this loop was given a Job, and not the folder with its data", "give the folder's path")
            self._reader = open_reader(config.data, self._folder, config.seed)
        for number in range(int(config.plan.batches[task.chunk])):
            positions = config.plan.positions(task.pass_index, task.chunk, number).tolist()
            self._renew_in_time()
            if not task.without.issuperset(positions):
                yield self._reader.batch(task.pass_index, task.chunk, number, config.batch_size, task.without)

    def finish(self, tasks: Sequence[LoopTask]) -> list[LoopTask]:
        """Finishes tasks. Returns those that were others' by then, which are done again. Raises GraphftError when the
        job has failed."""
        self._check_open()
        lost = self._queue.finish([_claim(task) for task in tasks], [])
        self.member.over()
        self._renew_in_time()
        return [task for task in tasks if (task.pass_index, task.chunk) in lost]

    def fail(self, task: LoopTask, reason: str | BaseException, batch: int | None = None) -> None:
        """Gives back a task that cannot be done, or of which this batch cannot. When that has happened `max_failures`
        times in a row, the whole task, or the batch, is discarded: see `max_discarded`."""
        self._check_open()
        place = task.pass_index, task.chunk, task.attempt
        fail_task(self._client, *place, batch or 0, str(reason), rest=batch is None)
        self.member.over()
        self._queue.forget([_claim(task)])

    def renew(self) -> None:
        """Renews the tasks that are held, as `get`, `batches` and `finish` do: call it some times in `chunk_timeout` if
        there is as much time between two of them."""
        self._check_open()
        self._queue.renew_now()
        self._renewed = time.monotonic()

    def _renew_in_time(self) -> None:
        if time.monotonic() - self._renewed > self.job.config.chunk_timeout / 4:
            self.renew()

    def request_save_model(self, seconds: float) -> bool:
        """True if this trainer is the one that is to save the model now: no other one is for so many seconds, a day at
        most. The same one gets it again; if it dies after all passes are done, others get it at once. False when the
        job is complete."""
        if not 0 < seconds <= MAX_SECONDS:
            raise _wrong(f"request_save_model({seconds!r})", f"give seconds above 0, at most {MAX_SECONDS:.0f}")
        found = self._call(RequestSaveModel(0, self.member.id, float(seconds)), SaveModelAnswer)
        return found is not None and found.granted

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, message: TASK_CALLS, answer: type[A]) -> A | None:
        """Returns the answer; None when the job is complete. Raises GraphftError when it has failed."""
        self._check_open()
        found = self._client.call(message, answer)
        if found is None:
            self.member.over()  # raises when it has failed, or is another run by now
        return found

    def _check_open(self) -> None:
        if not self._open:
            raise _wrong("this loop is closed", "make another TaskLoop")

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives back what it holds, and leaves. Without a coordinator it waits for some seconds: what it holds is free
        when its lease ends."""
        self._leave(complete=False)

    def _leave(self, *, complete: bool) -> None:
        if not self._open:
            return
        self._client.leaving = True
        with contextlib.suppress(LeaseLost):
            self._queue.release([Claim(key, 0, attempt) for key, attempt in self._queue.held.items()])
            if complete:
                self._client.call(CloseTasks(0, self.member.id, complete=True), TasksSettled)
        self._open = False
        self._client.close()
        self.member.close()

    def __enter__(self) -> TaskLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._leave(complete=self._done and kind is None)


def _claim(task: LoopTask) -> Claim:
    return Claim((task.pass_index, task.chunk), 0, task.attempt)


def _wrong(what: str, remedy: str) -> UsageError:
    return UsageError(what, rule="task-loop", help=remedy)
