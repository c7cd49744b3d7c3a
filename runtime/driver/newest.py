"""The newest committed checkpoint of a run, as its Trainer sees it: what `epoch`, `validate` and `save` are of."""

from __future__ import annotations

import time
from pathlib import Path

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.store import read_saved_step
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.driver.running_job import RunningJob
from graphft.runtime.interchange.job_state import LOOK_SECONDS, LOOKS, JobState, read_job
from graphft.runtime.launcher.process_ends import note_saved, was_saved
from graphft.transpiler import Job


class NewestCheckpoint:
    def __init__(self, job: Job, job_dir: Path) -> None:
        self.job, self.job_dir = job, job_dir
        self._seen = 0
        """The step of the newest one that was seen."""
        self._noted = False
        """Whether it is noted, for later scripts, that there was one."""

    def step(self, running: RunningJob | None) -> int:
        """As etcd tells while processes are `running`. Else it is what the folder holds: nobody would go back to an
        older one, and say so. Raises GraphftError if it held a newer one before, which an earlier script may have
        seen; StorageUnavailable if what is there cannot be read now."""
        view = self._view(running)
        if view is not None and view.committed is not None:
            self._seen = view.committed.step
            self._note()
            return self._seen
        for left in reversed(range(LOOKS)):
            found = read_saved_step(self.job_dir, self.job.config)
            lack = self._lack(found)
            if lack is None:
                break
            if not left:
                raise lack
            time.sleep(LOOK_SECONDS)  # another process may train the run, and have replaced what was looked at just now
        self._seen = found
        self._note()
        return found

    def _view(self, running: RunningJob | None) -> JobView | None:
        view = None
        for _ in range(LOOKS):
            if running is None or running.supervisor is None or not running.alive:
                break
            view = running.view()
            if view is not None:
                break
            time.sleep(LOOK_SECONDS)  # etcd has not answered
        return view

    def _lack(self, found: int) -> GraphftError | None:
        if found < self._seen:
            return self._older(found)
        if not found and was_saved(self.job_dir):
            return self._gone(f"{self.job_dir} holds no whole checkpoint, and it did when it was trained last")
        return None

    def _note(self) -> None:
        if self._seen and not self._noted:
            self._noted = note_saved(self.job_dir, self._seen)

    def _older(self, found: int) -> GraphftError:
        what = f"the checkpoint of step {self._seen} is gone, or damaged"
        if not found:
            return self._gone(f"{what}: {self.job_dir} holds no whole one")
        return GraphftError(
            f"{what}: the newest whole one of {self.job_dir} is of step {found}",
            rule="checkpoint",
            help=f"bring it back; or make another Trainer of this run, which goes on from step {found}",
        )

    def _gone(self, what: str) -> GraphftError:
        gone = "bring it back; if it is gone for good, begin a new run: another name=, or without that folder"
        return GraphftError(what, rule="checkpoint", help=gone)

    def state(self, running: RunningJob | None) -> JobState | None:
        """None before the first. Raises GraphftError if it is damaged or gone, or as `step`."""
        newest = self.step(running)
        if newest == 0:
            return None
        found, plan = self._read(newest), self.job.config.plan
        epoch = plan.pass_of(found.step)
        if epoch < plan.pass_of(newest):
            raise GraphftError(
                f"the checkpoint of step {newest}, epoch {plan.pass_of(newest)}, is damaged: the newest that is whole "
                f"is of step {found.step}, epoch {epoch}",
                rule="checkpoint",
                help="train() another epoch, which writes a new one; or shutdown(): another Trainer of this run goes "
                "on from the older one",
            )
        return found

    def _read(self, newest: int) -> JobState:
        """`newest`: the step of one that etcd knows, or the folder has just held."""
        try:
            return read_job(self.job_dir)
        except DamagedCheckpoint as error:
            raise GraphftError(
                error.message, rule=error.rule, help="bring it back as it was, or begin a new run"
            ) from error
        except GraphftError as error:
            if error.rule != "no-checkpoint":
                raise
            raise GraphftError(
                f"the checkpoint of step {newest} is gone: {self.job_dir} holds none",
                rule="checkpoint",
                help="bring it back; or train() another epoch, which writes a new one",
            ) from error
