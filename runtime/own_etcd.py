"""The etcd that a job without endpoints brings along: its data lie in the job's folder, and nobody else uses it."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.earlier_run import forget_files, is_dead
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.keys import Keys
from graphft.runtime.view import read_view

if TYPE_CHECKING:
    from graphft.transpiler import Job, JobRecord

DYING_SECONDS, POLL_SECONDS = 1.0, 0.01


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


def revoke_dead(etcd: Etcd, keys: Keys) -> None:
    """Ends the leases of this machine's processes that are no more: nobody has to wait for them.

    Those of a launcher that was just killed may be dying still; so it looks for a moment.
    """
    view, end = read_view(keys, etcd.range(keys.control).kvs), time.monotonic() + DYING_SECONDS
    left = [record for record in [*view.pservers.values(), *view.trainers.values()]
            if record.host == socket.gethostname() and view.leases[record.id]]
    while left:
        dead = [record for record in left if is_dead(record)]
        for record in dead:
            etcd.lease_revoke(view.leases[record.id])
        left = [record for record in left if record not in dead]
        if time.monotonic() > end:
            return
        time.sleep(POLL_SECONDS)
