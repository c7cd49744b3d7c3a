"""Shared by the benchmarks of the coordinator: a job of very many chunks, its coordinators, and trainers that compute
nothing.

Coordinators are the real ones, forks of the job's fork server, as a launcher makes them; etcd and ZeroMQ are real, too.
Trainers hold leases, are registered, and make their calls through `TaskClient`, but know no shard and load no job.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import msgspec
import numpy as np
import torch

import graphft
from graphft.plan import Plan
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Generation
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.engines.local import Forked, ForkServer
from graphft.runtime.etcd import Etcd, Session
from graphft.runtime.process.identity import Identity
from graphft.runtime.process.progress import Progress
from graphft.runtime.protocol.messages import FinishTasks, GetTasks, Tasks, TasksSettled
from graphft.runtime.queue.task_client import TaskClient
from graphft.transpiler.job import Job

PASSES = 1000
LIMIT = 120.0
"""Seconds that a process may take to start."""


def make_job(tasks: int, name: str = "dispatch", dispatch: str = "coordinator", lease_ttl: int = 10) -> Job:
    """Async: one record, one batch, one chunk, one task."""
    program = graphft.build(torch.nn.Linear(1, 1), lambda m, x: m(x).mean(), inputs={"x": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    options: dict[str, Any] = {"dispatch": dispatch, "lease_ttl": lease_ttl, "name": name, "epochs": PASSES}
    data = graphft.arrays(x=torch.zeros(tasks, 1), chunk_size=1)
    return graphft.transpile(program, data=data, batch_size=1, sync=False, ft=True, **options)


def light_job(name: str, run_id: str, tasks: int, lease_ttl: int = 10) -> Job:
    """Returns what a member of the job needs to know of it, without its million chunks."""
    plan = Plan([1] * tasks, slots=1, batch_size=1, passes=PASSES)
    return cast(Job, SimpleNamespace(run_id=run_id, config=SimpleNamespace(name=name, plan=plan, lease_ttl=lease_ttl)))


class Cluster:
    """The job's records in an etcd, and its coordinators."""

    def __init__(self, job: Job, folder: Path, endpoints: list[str]) -> None:
        self.job, self.folder, self.endpoints = job, folder, endpoints
        self.keys, self.etcd = Keys(job.config.name), Etcd(endpoints)
        put_job(self.etcd, self.keys, job, folder)
        # No shard is there: its record is what trainers compare when they finish tasks.
        self.etcd.put(self.keys.of_shard(0).generation, msgspec.json.encode(Generation(number=0)))
        (folder / "logs").mkdir(exist_ok=True)
        self.server = ForkServer(folder, os.environ)
        self.count = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.server.close()
        self.etcd.close()

    def start(self) -> Forked:
        """Another coordinator; returns when it is registered."""
        role = self.server.fork(
            "coordinator", self.count, ",".join(self.endpoints), self.folder / "logs" / "coordinator"
        )
        self.count += 1
        identity = role.await_made()
        threading.Thread(target=role.wait, daemon=True).start()
        self.await_view(lambda view: any(r.process == identity for r in view.coordinators.values()))
        return role

    def await_serving(self, role: Forked) -> None:
        self.await_view(lambda view: view.coordinator is not None and view.coordinator.process == role.identity)

    def await_view(self, ready: Any) -> None:
        end = time.monotonic() + LIMIT
        while not ready(self.view()):
            if time.monotonic() > end:
                raise TimeoutError(f"a coordinator does not come: see {self.folder}/logs")
            time.sleep(0.05)

    def view(self) -> JobView:
        return read_view(self.keys, self.etcd.range(self.keys.control).kvs)

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        kv = self.etcd.get(self.keys.task_counts)
        return msgspec.json.decode(kv.value) if kv is not None else {}


def memory(process: Identity) -> float:
    """MB that it has in memory, those that it shares with the fork server among them."""
    status = Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1]
    return int(status.split()[0]) / 1024


class Taker:
    """A trainer that gets and finishes tasks. `got` and `finished`: how often each task of each pass was."""

    def __init__(self, job: Job, endpoints: list[str], index: int) -> None:
        etcd = Etcd(endpoints)
        self.member = member = Member("trainer", index, etcd, job, Progress(math.inf))
        member.session = Session(member.etcd, job.config.lease_ttl).run_thread()
        member.etcd.put(member.keys.trainer(member.id), msgspec.json.encode(member.registration()), member.lease)
        self.client = TaskClient(member)
        member.wake = self.client.wake
        kv = etcd.get(member.keys.of_shard(0).generation)
        assert kv is not None
        self.fences = [kv.mod_revision]
        self.pass_index = 0
        self.tasks = len(job.config.plan.records)
        self.got: dict[int, np.ndarray] = {}
        self.finished: dict[int, np.ndarray] = {}

    def get(self, want: int) -> list[tuple[int, int]]:
        """Some tasks, or none: others hold what is left, or the pass that is worked on is another one from now on."""
        found = self.client.call(lambda n: GetTasks(n, self.member.id, self.pass_index, want), Tasks)
        self.pass_index = found.pass_index
        self.note(self.got, [chunk for chunk, _ in found.tasks])
        return found.tasks

    def finish(self, tasks: list[tuple[int, int]]) -> None:
        index = self.pass_index
        answer = self.client.call(lambda n: FinishTasks(n, self.member.id, index, tasks, self.fences), TasksSettled)
        if answer.refused:
            raise AssertionError(f"tasks {answer.refused} are another's")
        self.note(self.finished, [chunk for chunk, _ in tasks])

    def note(self, where: dict[int, np.ndarray], chunks: list[int]) -> None:
        counts = where.setdefault(self.pass_index, np.zeros(self.tasks, np.uint8))
        counts[chunks] += 1

    def close(self) -> None:
        self.client.close()
        self.member.close()
