"""The process of a coordinator that gives out tasks."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.ir import Program
from graphft.runtime.etcd import Store
from graphft.runtime.etcd.channel import parse_endpoint
from graphft.runtime.roles.coordinator import JobKeeper
from graphft.runtime.roles.role import Role
from graphft.runtime.roles.seen_view import SeenView
from graphft.runtime.roles.task_coordinator.task_server import TaskServer
from graphft.runtime.transport import Limits, ZmqServer
from graphft.runtime.transport.address import listen

if TYPE_CHECKING:
    from graphft.transpiler import Job

LIMITS = Limits(max_frame=4096, max_header=1 << 20)


class TaskCoordinator(Role):
    """Stands by until it holds the lock; then serves until the job is over, or the lock is lost. A process serves once:
    one that has lost the lock ends, and its launcher starts another, which reads the queues anew."""

    kind = "coordinator"

    def __init__(self, job: Job, job_dir: Path, program: Program, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, program, etcd, index)
        self._leaving = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._leave())
        self.transport = ZmqServer(LIMITS, self.member.login)
        self.member.wake, self.member.leaving = self.transport.wake, lambda: self._leaving
        self.member.address = listen(self.transport, [parse_endpoint(e).host for e in etcd.endpoints])
        self.ctx.view = SeenView(self.member)
        self.ctx.coordinator = JobKeeper(self.member, self.job_dir)
        self.open_session()
        assert self.member.session is not None
        self.server = TaskServer(self.member, self.member.session, self.transport, self.end)
        self.ctx.task_server = self.server

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
        return self.server.story()

    def status(self) -> msgspec.Struct:
        return self.server.status()
