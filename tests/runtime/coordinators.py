"""Coordinators and their callers on a real etcd, in the test's process: each coordinator is a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import EmbeddedEtcd, Session, put_op
from graphft.runtime.process.progress import Progress
from graphft.runtime.protocol.messages import FailTask, FinishTasks, GetTasks, TaskFailed, Tasks, TasksSettled
from graphft.runtime.queue.task_client import TaskClient
from graphft.runtime.roles.coordinator.coordinator import LIMITS
from graphft.runtime.roles.coordinator.task_server import TaskServer
from graphft.runtime.transport import ZmqServer
from graphft.runtime.transport.address import listen
from graphft.transpiler.job import Job
from tests.runtime.trainers import Interposed
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear_job
from tests.support.waiting import until

CHUNKS = 4


def async_job() -> Job:
    """Tasks of four batches, two passes."""
    return linear_job(CHUNKS * 8, batch_size=2, sync=False, epochs=2, dispatch="coordinator")


class Coordinator:
    """One that runs its program's serve block: lock, queues, address, loop. `failure`: what ended it."""

    def __init__(self, member: Member) -> None:
        self.member, self.stopping = member, threading.Event()
        self.transport = ZmqServer(LIMITS, member.login)
        member.wake, member.leaving = self.transport.wake, self.stopping.is_set
        member.address = listen(self.transport, ["127.0.0.1"])
        assert member.session is not None
        end: Any = SimpleNamespace(check_lease=member.check_lease)
        self.server = TaskServer(member, member.session, self.transport, end)
        self.failure: GraphftError | None = None
        self.terms: dict[str, Any] = {"timeout": 60.0, "max_failures": 2, "max_discarded": 99}
        self._thread = threading.Thread(target=self._run)

    def start(self, **terms: Any) -> Coordinator:
        self.terms |= terms
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.server.acquire_lock()
            self.server.load_tasks()
            self.server.publish()
            self.server.serve(**self.terms)
        except GraphftError as error:
            self.failure = error

    @property
    def serves(self) -> bool:
        return self.server.serving and self._thread.is_alive()

    def await_end(self) -> GraphftError | None:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.failure

    def die(self) -> None:
        """Its lease ends: at once it is no coordinator any more."""
        self.member.etcd.lease_revoke(self.member.lease)

    def stop(self) -> None:
        self.stopping.set()
        self.transport.wake()
        if self._thread.ident is not None:
            self._thread.join(120)
        self.server.close()
        self.transport.close()


class Trainer:
    """A registered trainer's calls."""

    def __init__(self, member: Member, keys: Keys) -> None:
        self.member, self.name = member, member.id
        self.client = TaskClient(member)
        member.wake = self.client.wake
        record = msgspec.json.encode(member.registration())
        member.etcd.txn([], [put_op(keys.trainer(member.id), record, member.lease)])

    def get(self, want: int = 1, pass_index: int = 0) -> dict[int, int]:
        return dict(self.tasks(want, pass_index).tasks)

    def tasks(self, want: int = 1, pass_index: int = 0) -> Tasks:
        return self.client.call(GetTasks(0, self.name, pass_index, want), Tasks)

    def finish(self, tasks: dict[int, int], pass_index: int = 0, fences: tuple[int, ...] = ()) -> list[int]:
        """Those that are refused."""
        return self.client.call(
            FinishTasks(0, self.name, pass_index, [*tasks.items()], [*fences]), TasksSettled
        ).refused

    def fail(self, chunk: int, attempt: int, batch: int, *records: int) -> TaskFailed:
        return self.client.call(FailTask(0, self.name, 0, chunk, attempt, batch, "it is bad", [*records]), TaskFailed)


class Scene:
    """A job in etcd, and its processes."""

    def __init__(self, stack: ExitStack, server: EmbeddedEtcd, keys: Keys, job: Job) -> None:
        self.stack, self.server, self.keys = stack, server, keys
        self.job = Job(job.source, job.config.replace(name=keys.job, lease_ttl=600), job.programs)
        self.etcd = stack.enter_context(Patient(server.endpoints))
        put_job(self.etcd, keys, self.job)

    def member(self, kind: str, index: int = 0) -> Any:
        """Its `etcd.store` is interposed."""
        etcd: Any = Interposed(self.stack.enter_context(Patient(self.server.endpoints)))
        member = Member(kind, index, etcd, self.job, Progress(), Session(etcd, 600))
        self.stack.callback(member.close)
        return member

    def coordinator(self, index: int = 0) -> Coordinator:
        made = Coordinator(self.member("coordinator", index))
        self.stack.callback(made.stop)
        return made

    def trainer(self, index: int = 0) -> Trainer:
        made = Trainer(self.member("trainer", index), self.keys)
        self.stack.callback(made.client.close)
        return made

    def value(self, key: str) -> bytes:
        kv = self.etcd.get(key)
        return kv.value if kv is not None else b""


@contextmanager
def scene_of(server: EmbeddedEtcd, keys: Keys, job: Job) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, server, keys, job)


def serving(scene: Scene, *coordinators: Coordinator) -> Coordinator:
    """The one of these that serves, when all processes have seen that."""

    def one() -> Coordinator | None:
        found = [c for c in coordinators if c.serves]
        named = scene.value(scene.keys.coordinator_addr)
        return found[0] if len(found) == 1 and found[0].member.id.encode() in named else None

    until(one)
    found = one()
    assert found is not None
    return found
