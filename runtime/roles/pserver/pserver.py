"""A pserver: one shard of what evolves. The process; what it serves is in round_server and batch_server."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.errors import UsageError
from graphft.runtime.etcd import EtcdError, Session, Store
from graphft.runtime.etcd.channel import parse_endpoint
from graphft.runtime.process.role_process import end_by
from graphft.runtime.queue.passes import close_passes, close_tasks
from graphft.runtime.queue.task_client import TaskClient, waking
from graphft.runtime.roles.limits import pserver_limits
from graphft.runtime.roles.pserver.shard_proof import prove_shard
from graphft.runtime.roles.pserver.shard_server import ShardServer
from graphft.runtime.roles.role import Role
from graphft.runtime.roles.seen_view import SeenView
from graphft.runtime.transport import ZmqServer
from graphft.runtime.transport.address import listen

if TYPE_CHECKING:
    from graphft.transpiler import Job

log = logging.getLogger("graphft")


class Pserver(Role):
    """One shard's process. Subclasses make `server`, its ServerPort."""

    kind = "pserver"
    server: ShardServer

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int, session: Session | None = None) -> None:
        if not 0 <= index < job.config.pservers:
            raise UsageError(
                f"there is no pserver {index}: the job has {job.config.pservers}",
                rule="role",
                help=f"indices are 0 to {job.config.pservers - 1}",
            )
        super().__init__(job, job_dir, job.pserver_program(index), etcd, index, session)
        self.limits = pserver_limits(job.programs.pservers, index, job.config.trainers)
        self.transport = ZmqServer(self.limits, self.member.login)
        self.member.wake = self.transport.wake
        self.member.address = listen(self.transport, [parse_endpoint(e).host for e in etcd.endpoints])
        self.view = self.ctx.view = SeenView(self.member)
        self.tasks = self._make_task_client()
        self.server = self.ctx.server = self.make_port()
        for name, value in self.program.values.items():
            self.ctx.scope[name] = value.detach().clone()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._leave())
        self.open_session()

    def _leave(self) -> None:
        """On SIGTERM. One that serves gives its lease back first, so that its successor need not wait for its end."""
        if self.server.machine is None or self.server.leaving:
            end_by(signal.SIGTERM)
        self.server.leaving = True

    def _make_task_client(self) -> TaskClient | None:
        """Calls the coordinator, if the job has one that gives out tasks."""
        if self.job.coordinator_program().find_op("serve_tasks") is None:
            return None
        client = TaskClient(self.member)
        self.member.wake = waking(self.transport, client)
        return client

    def make_port(self) -> ShardServer:
        raise NotImplementedError

    def close_records(self) -> None:
        """At the job's end: leaves no record of the queue open."""
        if self.tasks is not None:
            close_tasks(self.tasks, self.member.id)
        else:
            decided = self.member.view.decided
            end = decided.step if decided.stopped else self.config.total_steps
            close_passes(self.member.etcd, self.member.keys, self.config.plan, end)

    def run(self) -> None:
        """From start to the end of the job."""
        self.start_daemon()
        try:
            self.prove()
            self.blocks.run("init")
            self.blocks.run("serve")
        finally:
            self.server.saver.close()
            self.server.close()
            if self.member.session is None:  # no lease takes the report away: the launcher reads it at the end
                with contextlib.suppress(EtcdError):
                    self.session.report_status(last=True)
            self.close()
            if self.tasks is not None:
                self.tasks.close()
            self.transport.close()
        if self.server.leaving:
            log.info("left: SIGTERM asked this pserver to")
            end_by(signal.SIGTERM)

    def prove(self) -> None:
        prove_shard(self.member, self.blocks)

    def unready(self) -> str:
        return super().unready() or ("" if self.server.machine is not None else "its shard has no state so far")

    @property
    def at_step(self) -> int | None:
        return self.server.machine.version if self.server.machine is not None else None

    def story(self) -> list[str]:
        return self.server.story()

    def status(self) -> msgspec.Struct:
        return self.server.status()
