"""The job's record in etcd: whoever starts first writes it, everybody else finds out whether it is the same job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.etcd import absent, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.keys import Keys
from graphft.runtime.status import JobSpec

if TYPE_CHECKING:
    from graphft.transpiler import Job, JobRecord


def job_spec(job: Job | JobRecord) -> JobSpec:
    c = job.config
    return JobSpec(job.hash, c.trainers, c.pservers, c.sync, c.ft, c.passes, c.total_steps)


def put_job(etcd: Store, keys: Keys, job: Job | JobRecord) -> None:
    """Writes the job's record and what hangs on it, unless they are there. Raises GraphftError for another job's."""
    spec = msgspec.json.encode(job_spec(job))
    etcd.txn([absent(keys.spec)], [put_op(keys.spec, spec), put_op(keys.ps_desired, str(job.config.pservers).encode()),
                                   put_op(keys.state, b"running")], token=keys.spec)
    check_job(etcd, keys, job)


def check_job(etcd: Store, keys: Keys, job: Job | JobRecord) -> None:
    """Raises GraphftError if etcd's job of this name is not `job`."""
    kv = etcd.get(keys.spec)
    found = msgspec.json.decode(kv.value, type=JobSpec).program if kv is not None else job.hash
    if found != job.hash:
        raise GraphftError(f"etcd has another job named {keys.job}: program {found[:12]}, this one is {job.hash[:12]}",
                           rule="foreign-job", help="use the right job directory, or give this job another name")
