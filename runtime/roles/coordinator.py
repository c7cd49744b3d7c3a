"""The coordinator: writes the job's record, and waits for its end. The launcher does the same by itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from graphft.errors import GraphftError
from graphft.ir import Program
from graphft.runtime.coordination.run_record import put_job, run_record
from graphft.runtime.etcd import Store
from graphft.runtime.queue.stale_claims import StaleClaims
from graphft.runtime.roles.role import Role
from graphft.transpiler import Job


class Coordinator(Role):
    """Runs the coordinator's program."""

    kind = "coordinator"

    def __init__(self, job: Job, job_dir: Path, program: Program, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, program, etcd, index)
        self.ctx.coordinator, self.ctx.claims = JobKeeper(self), OthersClaims(self)
        self.open_session()

    def run(self) -> None:
        try:
            self.blocks.run("init")
            self.start_daemon()
            self.blocks.run("serve")
        finally:
            self.close()

    def status(self) -> msgspec.Struct:
        return run_record(self.job)


class JobKeeper:
    """The CoordinatorPort."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def put_job(self, pservers: int) -> None:
        role = self.role
        put_job(role.etcd, role.keys, role.job, role.job_dir)
        role.etcd.put(role.keys.ps_desired, str(pservers).encode())

    def await_job(self) -> None:
        role = self.role
        role.progress.begin("waiting for the job's end")
        while not role.view.over:
            role.progress.beat()
            role.watcher.wait(lambda kvs: role.keys.state in kvs and kvs[role.keys.state].value != b"running", 5.0)
            role.check_lease()
        if role.view.state == "failed":
            raise GraphftError(f"job {role.keys.job} failed", rule="job-failed", help="see its events: graphft status")


class OthersClaims:
    """The ClaimsPort of a process that claims nothing itself."""

    def __init__(self, role: Role) -> None:
        self.role, self._stale_claims = role, StaleClaims(role.etcd, role.keys, role.events)

    def requeue_stale(self, timeout: float) -> None:
        record = self.role.view.pass_
        if record is not None:
            self._stale_claims.look(record.pass_index, timeout)
