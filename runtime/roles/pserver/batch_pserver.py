"""An async shard's process."""

from __future__ import annotations

from graphft.runtime.checkpoint.async_writer import AsyncCommits, AsyncSaver
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.queue.passes import Requeue, RequeueByCoordinator
from graphft.runtime.roles.pserver.batch_server import BatchServer
from graphft.runtime.roles.pserver.pserver import Pserver


class BatchPserver(Pserver):
    """Its checkpoints are its own."""

    server: BatchServer

    def make_port(self) -> BatchServer:
        member, index = self.member, self.member.index
        commits = AsyncCommits(
            member.etcd,
            member.keys.of_shard(index),
            checkpoints_of(self.job_dir, index),
            index,
            self.config.pservers,
            self.job.run_id,
            member.id,
        )
        saver = AsyncSaver(commits, member.events, self.job, self.job_dir, self.close_records)
        if self.tasks is not None:
            requeue: Requeue = RequeueByCoordinator(member, self.tasks)
        else:
            requeue = Requeue(member.etcd, member.keys, self.config.plan)
        return BatchServer(
            member, self.blocks, self.end, self.view, self.transport, commits, saver, self.job_dir, requeue
        )
