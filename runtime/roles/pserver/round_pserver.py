"""A sync shard's process."""

from __future__ import annotations

from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.checkpoint.writer import Saver
from graphft.runtime.roles.pserver.pserver import Pserver
from graphft.runtime.roles.pserver.round_server import RoundServer


class RoundPserver(Pserver):
    """Its checkpoints are parts of the job's."""

    server: RoundServer

    def make_port(self) -> RoundServer:
        member, config = self.member, self.config
        store = checkpoints_of(self.job_dir)
        commits = Commits(member.etcd, member.keys, store, member.index, config.pservers, self.job.run_id, member.id)
        saver = Saver(commits, member.events, self.job, self.job_dir, self.close_records)
        return RoundServer(
            member, self.blocks, self.end, self.view, self.transport, commits, saver, self.job_dir, self.limits
        )
