"""Reads the state of a run: its newest checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.store import read_saved_step
from graphft.runtime.driver.running_job import RunningJob
from graphft.runtime.interchange.training_state import LOOK_SECONDS, LOOKS, JobState, optimizer_of, read_job
from graphft.runtime.launcher.process_ends import note_saved, was_saved
from graphft.transpiler import Job
from graphft.transpiler.layout import assemble


class NewestCheckpoint:
    """Finds the newest committed checkpoint of a run. One that was seen and is gone is an error."""

    def __init__(self, job: Job, job_dir: Path) -> None:
        self.job, self.job_dir = job, job_dir
        self._seen = 0

    def step(self, running: RunningJob | None) -> int:
        """Returns its step; 0 before the first: as etcd tells while processes are `running`, else as the folder holds.
        Raises GraphftError if it held a newer one before, which an earlier script may have seen; StorageUnavailable."""
        view = running.view() if running is not None and running.alive else None
        if view is not None and view.committed is not None:
            found = view.committed.step
        else:
            for _ in range(LOOKS):  # another process may train the run, and have replaced what was looked at just now
                found = read_saved_step(self.job_dir, self.job.config)
                if found >= self._seen and (found or not was_saved(self.job_dir)):
                    break
                time.sleep(LOOK_SECONDS)
            else:
                before = f"of step {self._seen}" if self._seen else "that was there when it was trained last"
                raise GraphftError(
                    f"the checkpoint {before} is gone, or damaged: {self.job_dir} holds "
                    + (f"one of step {found}" if found else "no whole one"),
                    rule="checkpoint",
                    help="bring it back; or make another Trainer of this run, which goes on from the older one; if all "
                    "are gone, begin a new run: another name=",
                )
        if found and not self._seen:
            note_saved(self.job_dir, found)
        self._seen = found
        return found

    def state(self, running: RunningJob | None) -> JobState | None:
        """Returns None before the first. Raises GraphftError if it is damaged, or as `step`."""
        newest, plan = self.step(running), self.job.config.plan
        if newest == 0:
            return None
        found = read_job(self.job_dir)
        if plan.pass_of(found.step) < plan.pass_of(newest):
            raise GraphftError(
                f"the checkpoint of step {newest}, epoch {plan.pass_of(newest)}, is damaged: the newest that is whole "
                f"is of step {found.step}, epoch {plan.pass_of(found.step)}",
                rule="checkpoint",
                help="train() another epoch, which writes a new one; or shutdown(): another Trainer of this run goes "
                "on from the older one",
            )
        return found


# -- as a dict, and saved ---------------------------------------------------------------------------------------------


class _Part:
    """A state that is there already, as an object that is saved."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state


def as_dict(found: JobState | None, job: Job) -> dict[str, Any]:
    """Returns what a Trainer's `state_dict` does; None: as the run begins."""
    if found is None:
        shards = [job.pserver_program(i).values for i in range(job.config.pservers)]
        return {"epoch": 0, "step": 0, "model": assemble(job.trainer_program(), shards), "optimizer": {}}
    epoch = job.config.plan.pass_of(found.step)
    return {"epoch": epoch, "step": found.step, "model": found.model, "optimizer": found.optimizer}


def parts_of(state: Mapping[str, Any], found: JobState | None) -> dict[str, _Part]:
    """Returns what `save` writes: model and optimizer as torch has them, and the place in the run."""
    nothing: dict[str, Any] = {"state": {}, "param_groups": []}
    optimizer = nothing if found is None else optimizer_of(found).by_name()
    place = {"epoch": state["epoch"], "step": state["step"]}
    return {"model": _Part(state["model"]), "optimizer": _Part(optimizer), "trainer": _Part(place)}
