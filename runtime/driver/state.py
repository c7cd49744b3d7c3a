"""Reads the state of a run, its newest checkpoint, and puts another one in its place."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graphft.capture.weights import load_weights, saved_variables
from graphft.errors import GraphftError, UsageError
from graphft.ir import Program
from graphft.runtime.checkpoint.manifest import MADE, SOURCE, Manifest, made
from graphft.runtime.checkpoint.reshard import cut, whole_state
from graphft.runtime.checkpoint.store import CheckpointStore, checkpoints_of, read_saved_step
from graphft.runtime.driver.options import check_number
from graphft.runtime.driver.running_job import RunningJob
from graphft.runtime.interchange.training_state import LOOK_SECONDS, LOOKS, JobState, optimizer_of, read_job
from graphft.runtime.launcher.process_ends import note_saved, was_saved
from graphft.runtime.loop import read_check_point
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


def read_saved(path: str | os.PathLike[str], version: int | None) -> dict[str, Any]:
    """Returns what `save` of a Trainer left, or the model of what a loop has saved. Raises UsageError for anything
    else."""
    if version is not None:
        check_number("version", version, 0)
    found = None if Path(path).is_file() else read_check_point(path, version=version)
    parts = found.states if found is not None else {}
    if "model" not in parts:
        raise UsageError(
            f"there is no checkpoint with a model in {path}",
            rule="no-checkpoint",
            help="give what was given to save(); of a file: load_state_dict(torch.load(path, weights_only=True))",
        )
    place = parts.get("trainer")
    if not (isinstance(place, Mapping) and place.keys() == {"epoch", "step"} and "optimizer" in parts):
        return {"model": parts["model"]}  # a loop's own objects, whatever it calls them
    return {**place, "model": parts["model"], "optimizer": parts["optimizer"]["state"]}


# -- in the place of another one --------------------------------------------------------------------------------------


def split(state: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], Any]:
    """Returns (model, optimizer) of what `Trainer.state_dict` returned, or of a model's own state_dict."""
    if "model" in state and isinstance(state["model"], Mapping):
        return state["model"], state.get("optimizer") or {}
    return state, {}


def check_state(program: Program, state: Mapping[str, Any]) -> None:
    """Raises GraphftError for a state that no checkpoint of `program` could take."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"a state is expected, got a {type(state).__name__}",
            rule="weights",
            help="give what state_dict() of a Trainer or of a model returned",
        )
    model, optimizer = split(state)
    load_weights(program, model)
    states = list(optimizer.values()) if isinstance(optimizer, Mapping) else [None]
    if not all(
        isinstance(s, Mapping) and all(isinstance(v, Tensor) and not v.is_meta for v in s.values()) for s in states
    ):
        raise UsageError(
            "the optimizer's state is expected as tensors by parameter and name",
            rule="weights",
            help="give that of a Trainer's state_dict(), not a torch optimizer's; or the model alone",
        )


@dataclass(frozen=True)
class Replacement:
    """A checkpoint in the place of the newest one, at its step, with other values. `shards`: their tensors."""

    job: Job
    store: CheckpointStore
    newest: Manifest
    shards: Sequence[Mapping[str, Tensor]]

    @staticmethod
    def of(job: Job, program: Program, folder: Path, state: Mapping[str, Any]) -> Replacement:
        """An optimizer's state that is not given stays. Raises GraphftError[weights] if something does not fit, and
        [no-checkpoint], [checkpoint]; nothing is changed."""
        model, optimizer = split(state)
        values, store = load_weights(program, model).values, checkpoints_of(folder)
        own = [m for m in store.manifests() if m.run == job.run_id]
        if not own:
            raise UsageError(
                f"{folder} has no checkpoint yet: there is nothing whose values could be replaced",
                rule="no-checkpoint",
                help="give weights to begin with as init_from= of the Trainer; or train an epoch first",
            )
        newest = max(own, key=lambda m: (m.generation, m.step))
        whole, rest = whole_state(job, [store.read_part(newest, i)[0] for i in range(job.config.pservers)])
        fixed = [v.name for v in saved_variables(program) if v.name not in whole]
        if changed := [name for name in fixed if not values[name].equal(program.values[name])]:
            raise GraphftError(
                f"{', '.join(changed[:5])} would change, and is no part of the checkpoints: it is frozen, or a "
                "constant",
                rule="weights",
                help="begin a new run with these values: init_from= of the Trainer, and another name=",
            )
        for variable in saved_variables(program):
            if variable.name in whole:
                whole[variable.name][""] = values[variable.name].reshape(whole[variable.name][""].shape)
        for name, states in optimizer.items():
            _replace_optimizer(name, whole.get(name, {}), states, program.values[name].shape if name in whole else ())
        return Replacement(job, store, newest, cut(job, whole, rest))

    def write(self) -> Manifest:
        """Writes all but the manifest that makes it count: that is for `put_in_place`. No process of the job may be
        there. Raises OSError; nothing is changed then."""
        generation, step, count = self.store.latest_generation() + 1, self.newest.step, len(self.shards)
        by = made(**{SOURCE: f"load_state_dict, at {self.newest.directory}"})
        self.store.mark_loaded(self.job.run_id)
        parts = [self.store.write_part(generation, step, i, count, each) for i, each in enumerate(self.shards)]
        return Manifest(generation, step, self.job.run_id, tuple(parts), {**self.newest.meta, MADE: by})

    def put_in_place(self, manifest: Manifest) -> None:
        """The job goes on from it when its etcd knows of no other. Raises OSError: it may count nevertheless, after a
        rename, or a request without an answer."""
        self.store.write_manifest(manifest)
        with contextlib.suppress(OSError):  # this one is of the highest generation: the others do not count
            self.store.discard([d for d in self.store.directories() if d != manifest.directory])


def _replace_optimizer(name: str, there: dict[str, Tensor], states: Mapping[str, Tensor], shape: Sequence[int]) -> None:
    """Replaces those of a parameter of this `shape`."""
    for key, value in states.items():
        before = there.get(f"@{key}")
        same = before is not None and before.numel() == value.numel() and before.dtype == value.dtype
        whole = before is not None and before.numel() == math.prod(shape) > 1
        if before is None or not same or (whole and value.shape != shape):
            raise GraphftError(
                f"the optimizer's state {key} of {name} does not fit: "
                + ("there is none" if before is None else f"{value.dtype} of shape {list(value.shape)}"),
                rule="weights",
                help="load the state of a trainer with the same model and optimizer, or the model alone",
            )
        there[f"@{key}"] = value.reshape(before.shape).clone()
