"""A launch without a driver, of a job whose passes are on demand: it ends when those that it asked for are done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.stored_checkpoints import checkpoints_of
from graphft.runtime.coordination.discarded import discarded_of
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.lost_rows import read_lost_rows
from graphft.runtime.coordination.status import JobStatus, read_left_out
from graphft.runtime.etcd import EtcdError, Store
from graphft.runtime.launcher.folder_status import lost_so_far_in
from graphft.runtime.launcher.process_ends import note_lost_rows, note_saved
from graphft.runtime.launcher.result import Result
from graphft.runtime.launcher.tell import tell

if TYPE_CHECKING:
    from graphft.runtime.launcher.supervisor import Supervisor
    from graphft.transpiler import JobConfig


class PassesDone(Exception):
    """Those that were asked for."""


@dataclass
class AskedPasses:
    config: JobConfig
    job_dir: Path
    passes: int
    step: int
    """Where they end."""
    _told: bool = False

    @staticmethod
    def of(config: JobConfig, job_dir: Path, passes: int | None) -> AskedPasses | None:
        """None where the job itself ends with them. Raises UsageError for none at all."""
        if passes is None or not config.passes_on_demand or passes >= config.passes:
            return None
        if passes < 1:
            raise UsageError(f"passes is {passes}, expected 1 or more", rule="option", help="how many, in all")
        return AskedPasses(config, job_dir, passes, int(config.plan.start_steps[passes]))

    def look(self, supervisor: Supervisor, status: JobStatus) -> None:
        """Raises PassesDone when all shards have got there, and their checkpoint lies there whole: what etcd knows of
        an earlier launch may not be true any more."""
        shards = [shard.get("version", -1) for shard in status.pservers.values()]
        if len(shards) < self.config.pservers or min(shards) < self.step:
            return
        try:
            committed = supervisor.view.committed
            if committed is None or committed.step < self.step:
                return
            checkpoints_of(self.job_dir).read_manifest(committed.checkpoint)
        except (EtcdError, GraphftError) as error:
            if not isinstance(error, EtcdError) and not self._told:
                self._told = True
                tell(f"the passes that were asked for are done, and their checkpoint cannot be read: {error.message}")
            return
        self.step = committed.step  # more may have been done before
        note_saved(self.job_dir, self.step)
        raise PassesDone

    def result(self, etcd: Store, keys: Keys, seconds: float) -> Result:
        """With a line for what the job did without so far."""
        from graphft.transpiler import read_record

        rows = read_lost_rows(etcd, keys)
        note_lost_rows(self.job_dir, rows)
        left_out = discarded_of(self.config, read_left_out(etcd, keys))
        for line in lost_so_far_in(self.job_dir, read_record(self.job_dir)):
            tell(line)
        tell(f"the {self.passes} passes that were asked for are done, and {self.job_dir} can be gone on with")
        return Result.of(self.job_dir, self.step, seconds, left_out, rows)
