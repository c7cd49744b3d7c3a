"""The coordinator: writes the job's record, and waits for its end. The launcher does the same by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.etcd import absent, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.keys import Keys
from graphft.runtime.overdue import Overdue
from graphft.runtime.roles.base import Role
from graphft.runtime.status import JobSpec

if TYPE_CHECKING:
    from graphft.ops.context import QueuePort
    from graphft.transpiler import Job


def job_spec(job: Job) -> JobSpec:
    c = job.config
    return JobSpec(job.hash, c.trainers, c.pservers, c.sync, c.ft, c.passes, c.total_steps)


def put_job(etcd: Store, keys: Keys, job: Job) -> None:
    """Writes the job's record and what hangs on it, unless they are there. Raises GraphftError for another job's."""
    spec = msgspec.json.encode(job_spec(job))
    etcd.txn([absent(keys.spec)], [put_op(keys.spec, spec), put_op(keys.ps_desired, str(job.config.pservers).encode()),
                                   put_op(keys.state, b"running")], token=keys.spec)
    check_job(etcd, keys, job)


def check_job(etcd: Store, keys: Keys, job: Job) -> None:
    """Raises GraphftError if etcd's job of this name is not `job`."""
    kv = etcd.get(keys.spec)
    found = msgspec.json.decode(kv.value, type=JobSpec).program if kv is not None else job.hash
    if found != job.hash:
        raise GraphftError(f"etcd has another job named {keys.job}: program {found[:12]}, this one is {job.hash[:12]}",
                           rule="foreign-job", help="use the right job directory, or give this job another name")


class Coordinator(Role):
    """Runs the coordinator's program."""

    kind = "coordinator"
    leased = False

    def run(self) -> None:
        self._overdue = Overdue(self.etcd, self.keys, self.events)
        self.ctx.coordinator = self
        self.ctx.queue = cast("QueuePort", self)  # its program asks for requeue_overdue only
        try:
            self.run_block("init")
            self.start_daemon()
            self.run_block("serve")
        finally:
            self.close()

    def put_job(self, pservers: int) -> None:
        put_job(self.etcd, self.keys, self.job)

    def await_job(self) -> None:
        while not self.view.over:
            self.watcher.wait(lambda kvs: self.keys.state in kvs and kvs[self.keys.state].value != b"running", 5.0)
            self.check_lease()
        if self.view.state == "failed":
            raise GraphftError(f"job {self.keys.job} failed", rule="job-failed", help="see its events: graphft status")

    def requeue_overdue(self, timeout: float, max_failures: int) -> None:
        record = self.view.pass_
        if record is not None:
            self._overdue.look(record.pass_index, timeout)

    def status(self) -> msgspec.Struct:
        return job_spec(self.job)
