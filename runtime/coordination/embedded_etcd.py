"""The etcd that a job without endpoints brings along: only this job uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.stale_run import forget_files, revoke_dead
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.etcd.embedded import HOST

if TYPE_CHECKING:
    from graphft.transpiler import Job, JobRecord


def start_etcd(job: Job | JobRecord, job_dir: Path, data: str = "", host: str = "") -> EmbeddedEtcd:
    """Returns the running server, with what an earlier run of the job left in `data` (by default in the job's folder),
    as far as the job can go on from it. `host`: the address of this machine at which other machines reach it."""
    if not job.config.ft:
        forget_files(job_dir)
    server = EmbeddedEtcd(data or job_dir / "etcd", host=host or HOST).start()
    try:
        with Etcd(server.endpoints) as etcd:
            revoke_dead(etcd, Keys(job.config.name))
    except BaseException:
        server.stop()
        raise
    return server
