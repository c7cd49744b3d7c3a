"""A coordinator's process: one that waits for the job's end, as the launcher does by itself; and one that gives out
tasks."""

from __future__ import annotations

from pathlib import Path

import msgspec

from graphft.ir import Program
from graphft.ops.context import ClaimsPort
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import CoordinatorStatus
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import Store
from graphft.runtime.etcd.channel import parse_endpoint
from graphft.runtime.queue.transactions import StaleClaims
from graphft.runtime.roles.coordinator.task_server import TaskServer
from graphft.runtime.roles.role import Role, SeenView
from graphft.runtime.transport import Limits, ZmqServer
from graphft.runtime.transport.address import listen
from graphft.transpiler.job import Job

LIMITS = Limits(max_frame=4096, max_header=1 << 20)


class OthersClaims(ClaimsPort):
    """The claims of others, seen by a process that claims nothing itself."""

    def __init__(self, member: Member) -> None:
        self.member, self._stale_claims = member, StaleClaims(member.etcd, member.keys, member.events)

    def renew(self, timeout: float) -> None:
        record = self.member.view.pass_
        if record is not None:
            self._stale_claims.look(record.pass_index, timeout)


class Coordinator(Role):
    """Writes the job's record, and waits for its end."""

    kind = "coordinator"

    def __init__(self, job: Job, job_dir: Path, program: Program, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, program, etcd, index)
        self.ctx.view, self.ctx.claims, self.ctx.coordinator = SeenView(self.member), OthersClaims(self.member), self
        self.open_session()

    def put_job(self, pservers: int) -> None:
        member = self.member
        put_job(member.etcd, member.keys, member.job, self.job_dir)
        member.etcd.put(member.keys.ps_desired, str(pservers).encode())

    def await_job(self) -> None:
        member, state = self.member, self.member.keys.state
        member.progress.begin("waiting for the job's end")
        while not member.over():
            member.progress.beat()
            member.watcher.wait(lambda kvs: state in kvs and kvs[state].value != b"running", 5.0)
            member.check_lease()

    def run(self) -> None:
        try:
            self.blocks.run("init")
            self.start_daemon()
            self.blocks.run("serve")
        finally:
            self.close()

    def status(self) -> msgspec.Struct:
        return CoordinatorStatus()


class TaskCoordinator(Coordinator):
    """Stands by until it holds the lock; then serves until the job is over, or the lock is lost. A process serves once:
    one that has lost the lock ends, and its launcher starts another, which reads the queues anew."""

    def __init__(self, job: Job, job_dir: Path, program: Program, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, program, etcd, index)
        self._leaving = False
        self.on_sigterm(self._leave)
        self.transport = ZmqServer(LIMITS, self.member.login)
        self.member.wake, self.member.leaving = self.transport.wake, lambda: self._leaving
        self.member.address = listen(self.transport, [parse_endpoint(e).host for e in etcd.endpoints])
        assert self.member.session is not None
        self.server = self.ctx.task_server = TaskServer(self.member, self.member.session, self.transport, self.end)

    def _leave(self) -> None:
        self._leaving = True

    def run(self) -> None:
        self.start_daemon()
        try:
            self.blocks.run("init")
            self.blocks.run("serve")
        finally:
            self.server.close()
            self.close()
            self.transport.close()

    def story(self) -> list[str]:
        return list(self.server.queue.story)

    def status(self) -> msgspec.Struct:
        return self.server.status()
