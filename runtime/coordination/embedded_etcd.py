"""The etcd that a job without endpoints brings along: its data lie in the job's folder, and only this job uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.stale_run import forget_files, revoke_dead
from graphft.runtime.etcd import EmbeddedEtcd, Etcd

if TYPE_CHECKING:
    from graphft.transpiler import Job, JobRecord


def start_etcd(job: Job | JobRecord, job_dir: Path) -> EmbeddedEtcd:
    """The running server, with what an earlier run of the job left, as far as the job can go on from it."""
    if not job.config.ft:
        forget_files(job_dir)
    server = EmbeddedEtcd(job_dir / "etcd").start()
    try:
        with Etcd(server.endpoints) as etcd:
            revoke_dead(etcd, Keys(job.config.name))
    except BaseException:
        server.stop()
        raise
    return server
