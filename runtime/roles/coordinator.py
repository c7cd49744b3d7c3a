"""The coordinator: writes the job's record, and waits for its end. The launcher does the same by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.coordination.run_record import put_job, run_record
from graphft.runtime.queue.stale_claims import StaleClaims
from graphft.runtime.roles.role import Role

if TYPE_CHECKING:
    from graphft.ops.context import QueuePort


class Coordinator(Role):
    """Runs the coordinator's program."""

    kind = "coordinator"

    def run(self) -> None:
        self._stale_claims = StaleClaims(self.etcd, self.keys, self.events)
        self.ctx.coordinator = self
        self.ctx.queue = cast("QueuePort", self)  # its program asks for requeue_stale only
        self.open_session()
        try:
            self.run_block("init")
            self.start_daemon()
            self.run_block("serve")
        finally:
            self.close()

    def put_job(self, pservers: int) -> None:
        put_job(self.etcd, self.keys, self.job, self.job_dir)
        self.etcd.put(self.keys.ps_desired, str(pservers).encode())

    def await_job(self) -> None:
        self.progress.begin("waiting for the job's end")
        while not self.view.over:
            self.progress.beat()
            self.watcher.wait(lambda kvs: self.keys.state in kvs and kvs[self.keys.state].value != b"running", 5.0)
            self.check_lease()
        if self.view.state == "failed":
            raise GraphftError(f"job {self.keys.job} failed", rule="job-failed", help="see its events: graphft status")

    def requeue_stale(self, timeout: float) -> None:
        record = self.view.pass_
        if record is not None:
            self._stale_claims.look(record.pass_index, timeout)

    def status(self) -> msgspec.Struct:
        return run_record(self.job)
