"""The newest committed checkpoint of a run, as its Trainer sees it: what `epoch`, `validate` and `save` are of."""

from __future__ import annotations

from pathlib import Path

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.saved_step import saved_step
from graphft.runtime.driver.running_job import RunningJob
from graphft.runtime.interchange.job_state import JobState, read_job
from graphft.runtime.launcher.process_ends import note_saved, read_ends
from graphft.runtime.launcher.tell import tell
from graphft.transpiler import Job


class NewestCheckpoint:
    def __init__(self, job: Job, job_dir: Path) -> None:
        self.job, self.job_dir = job, job_dir
        self._seen = 0
        """The step of the newest one that was seen."""
        self._noted = False
        """Whether it is noted, for later scripts, that there was one; or told that it is gone."""

    def step(self, running: RunningJob | None) -> int:
        """As etcd tells while processes are `running`. Else it is what the folder holds: nobody would go back to an
        older one, and say so. Raises GraphftError if it held a newer one before, or cannot be read now."""
        view = running.view() if running is not None and running.alive else None
        if view is not None and view.committed is not None:
            self._seen = view.committed.step
            self._note()
            return self._seen
        found = saved_step(self.job_dir, self.job.config)
        if found is None:
            raise GraphftError(
                f"the checkpoints of {self.job_dir} cannot be read now",
                rule="storage",
                help="see whether its file system or storage can be reached",
            )
        if found < self._seen:
            raise self._older(found)
        self._seen = found
        self._note()
        return found

    def _older(self, found: int) -> GraphftError:
        if not found:
            return GraphftError(
                f"the checkpoint of step {self._seen} is gone: {self.job_dir} holds no checkpoint",
                rule="checkpoint",
                help="bring it back; if it is gone for good, begin a new run: another name=, or without that folder",
            )
        return GraphftError(
            f"the checkpoint of step {self._seen} is gone, or damaged: the newest that {self.job_dir} holds is of step "
            f"{found}",
            rule="checkpoint",
            help=f"bring it back; or make another Trainer of this run, which goes on from step {found}",
        )

    def _note(self) -> None:
        """Once. An earlier script had a checkpoint, and there is none now: that is told, for `train` waits for it."""
        if self._noted or not (self._seen or self._had_one()):
            return
        self._noted = True
        if not self._seen:
            tell(f"{self._gone()}; bring it back: the run waits for it")
        elif not self._had_one():
            note_saved(self.job_dir, self._seen)

    def _had_one(self) -> bool:
        return read_ends(self.job_dir).saved

    def _gone(self) -> str:
        return f"{self.job_dir} holds no checkpoint, and it did when it was trained last"

    def there(self, running: RunningJob | None) -> int:
        """As `step`. Raises GraphftError, too, if there is none and an earlier script had one."""
        newest = self.step(running)
        if newest == 0 and self._had_one():
            raise GraphftError(self._gone(), rule="checkpoint", help="bring it back, or begin a new run: another name=")
        return newest

    def state(self, running: RunningJob | None) -> JobState | None:
        """None before the first. Raises GraphftError if it is damaged or gone, or as `step`."""
        newest = self.there(running)
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
        except GraphftError as error:
            if error.rule != "no-checkpoint":
                raise
            raise GraphftError(
                f"the checkpoint of step {newest} is gone: {self.job_dir} holds none",
                rule="checkpoint",
                help="bring it back; or train() another epoch, which writes a new one",
            ) from error
