"""The coordinator: writes the job's record, and waits for its end. The launcher does the same by itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from graphft.errors import GraphftError
from graphft.ir import Program
from graphft.ops.context import ClaimsPort, CoordinatorPort
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.run_record import put_job, run_record
from graphft.runtime.etcd import Store
from graphft.runtime.queue.transactions import StaleClaims
from graphft.runtime.roles.role import Role
from graphft.runtime.roles.seen_view import SeenView
from graphft.transpiler import Job


class Coordinator(Role):
    """Runs the coordinator's program."""

    kind = "coordinator"

    def __init__(self, job: Job, job_dir: Path, program: Program, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, program, etcd, index)
        self.ctx.view, self.ctx.claims = SeenView(self.member), OthersClaims(self.member)
        self.ctx.coordinator = JobKeeper(self.member, self.job_dir)
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


class JobKeeper(CoordinatorPort):
    """Writes the job's record, and waits for its end."""

    def __init__(self, member: Member, job_dir: Path) -> None:
        self.member, self.job_dir = member, job_dir

    def put_job(self, pservers: int) -> None:
        member = self.member
        put_job(member.etcd, member.keys, member.job, self.job_dir)
        member.etcd.put(member.keys.ps_desired, str(pservers).encode())

    def await_job(self) -> None:
        member, state = self.member, self.member.keys.state
        member.progress.begin("waiting for the job's end")
        while not member.view.over:
            member.progress.beat()
            member.watcher.wait(lambda kvs: state in kvs and kvs[state].value != b"running", 5.0)
            member.check_lease()
        if member.view.state == "failed":
            raise GraphftError(
                f"job {member.keys.job} failed", rule="job-failed", help="see its events: graphft status"
            )


class OthersClaims(ClaimsPort):
    """The claims of others, seen by a process that claims nothing itself."""

    def __init__(self, member: Member) -> None:
        self.member, self._stale_claims = member, StaleClaims(member.etcd, member.keys, member.events)

    def renew(self, timeout: float) -> None:
        record = self.member.view.pass_
        if record is not None:
            self._stale_claims.look(record.pass_index, timeout)
