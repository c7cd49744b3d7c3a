"""A pserver's process: one shard of what evolves. What it serves is in round_server (sync) and batch_server (async)."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from graphft.errors import UsageError
from graphft.runtime.checkpoint.async_writer import AsyncCommits, AsyncSaver
from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.checkpoint.versioned_store import StorageUnavailable
from graphft.runtime.checkpoint.writer import Saver
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EtcdError, Session, Store, absent, put_op
from graphft.runtime.etcd.channel import parse_endpoint
from graphft.runtime.execute.accelerator import own_device
from graphft.runtime.process.role_process import end_by
from graphft.runtime.protocol.messages import CloseTasks, TasksSettled
from graphft.runtime.queue.passes import Requeue, RequeueByCoordinator, close_passes
from graphft.runtime.queue.task_client import TaskClient, waking
from graphft.runtime.roles.programs import pserver_limits
from graphft.runtime.roles.pserver.batch_server import BatchServer
from graphft.runtime.roles.pserver.round_server import RoundServer
from graphft.runtime.roles.pserver.shard_server import ShardServer
from graphft.runtime.roles.role import Role, SeenView
from graphft.runtime.transport import ZmqServer
from graphft.runtime.transport.address import listen

if TYPE_CHECKING:
    from graphft.transpiler.job import Job

log = logging.getLogger("graphft")

SPARE_SECONDS = 0.2
"""Between two looks of a spare pserver."""


class Pserver(Role):
    """One shard's process."""

    kind = "pserver"

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
        self.tasks: TaskClient | None = None
        """Calls the coordinator, if the job has one that gives out tasks."""
        if job.coordinator_program().find_op("serve_tasks") is not None:
            self.tasks = TaskClient(self.member)
            self.member.wake = waking(self.transport, self.tasks)
        self.server = self.ctx.server = self._make_server()
        for name, value in self.program.values.items():
            self.ctx.scope[name] = value.detach().to(self.ctx.device, copy=True)
        self.on_sigterm(self._leave)
        self.open_session()

    def device(self, index: int) -> str:
        return own_device(self.config.pserver_device, index)

    def _make_server(self) -> ShardServer:
        member, config, run = self.member, self.config, self.job.run_id
        shared: dict[str, Any] = {
            "member": member,
            "blocks": self.blocks,
            "end": self.end,
            "view": self.view,
            "transport": self.transport,
            "job_dir": self.job_dir,
        }
        shard, of = member.index, config.pservers
        if config.sync:
            commits = Commits(member.etcd, member.keys, checkpoints_of(self.job_dir), shard, of, run, member.id)
            saver = Saver(commits, member.events, self.job, self.job_dir, self.close_records)
            return RoundServer(**shared, commits=commits, saver=saver, limits=self.limits)
        keys, store = member.keys.of_shard(shard), checkpoints_of(self.job_dir, shard)
        own = AsyncCommits(member.etcd, keys, store, shard, of, run, member.id)
        saver = AsyncSaver(own, member.events, self.job, self.job_dir, self.close_records)
        requeue = (
            RequeueByCoordinator(member, self.tasks)
            if self.tasks is not None
            else Requeue(member.etcd, member.keys, config.plan)
        )
        return BatchServer(**shared, commits=own, saver=saver, requeue=requeue)

    def _leave(self) -> None:
        """One that serves gives its lease back first, so that its successor need not wait for its end."""
        if self.server.machine is None or self.server.leaving:
            end_by(signal.SIGTERM)
        self.server.leaving = True

    def close_records(self) -> None:
        """At the job's end: leaves no record of the queue open."""
        if self.tasks is not None:
            self.tasks.call(CloseTasks(0, self.member.id), TasksSettled)  # it gives out no task any more
        else:
            decided = self.member.view.decided
            end = decided.step if decided.stopped else self.config.total_steps
            close_passes(self.member.etcd, self.member.keys, self.config.plan, end)

    def run(self) -> None:
        self.start_daemon()
        try:
            self.blocks.run("init")
            self.blocks.run("serve")
        except StorageUnavailable:
            if not self.member.view.over:  # else the job has ended while this shard waited for its checkpoints
                raise
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

    def unready(self) -> str:
        return super().unready() or ("" if self.server.machine is not None else "its shard has no state so far")

    @property
    def at_step(self) -> int | None:
        return self.server.machine.version if self.server.machine is not None else None

    def story(self) -> list[str]:
        return list(self.server.machine.story) if self.server.machine is not None else []

    def status(self) -> msgspec.Struct:
        return self.server.status()


def claim_index(etcd: Store, keys: Keys, pservers: int, ttl: int) -> tuple[int, Session | None] | None:
    """Returns the lowest index that no live pserver has or is about to take, claimed on the lease of a new session.
    While all are taken it waits as a spare, which has no lease. `ttl`: of the lease in seconds, 0 for none. None: the
    job is over."""
    told = False
    while (state := etcd.get(keys.state)) is None or state.value == b"running":
        taken = {kv.key for prefix in (keys.pservers, keys.index_claims) for kv in etcd.range(prefix).kvs}
        for index in range(pservers):
            if not {keys.pserver(index), keys.index(index)} & taken:
                session = Session(etcd, ttl) if ttl else None
                lease = session.lease if session is not None else 0
                claim = put_op(keys.index(index), uuid.uuid4().hex.encode(), lease)
                if etcd.txn([absent(keys.pserver(index)), absent(claim.key)], [claim], token=claim.key).ok:
                    if session is not None:
                        session.keep(etcd.urls)
                    return index, session
                if session is not None:
                    session.close()
        if not told:
            log.info("all %d pservers are alive; waiting to take the place of one that dies", pservers)
            told = True
        time.sleep(SPARE_SECONDS)
    return None
