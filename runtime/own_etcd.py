"""The etcd that a job without endpoints brings along: its data lie in the job's folder, and nobody else uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.earlier_run import forget_files, is_dead
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.keys import Keys
from graphft.runtime.view import read_view

if TYPE_CHECKING:
    from graphft.transpiler import Job


def start_etcd(job: Job, job_dir: Path) -> EmbeddedEtcd:
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
    """Ends the leases of this machine's processes that are no more: nobody has to wait for them."""
    view = read_view(keys, etcd.range(keys.control).kvs)
    for record in [*view.pservers.values(), *view.trainers.values()]:
        if is_dead(record) and view.leases[record.id]:
            etcd.lease_revoke(view.leases[record.id])
