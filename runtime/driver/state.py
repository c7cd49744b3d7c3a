"""A trainer's state as tensors, and a state that is put in the place of another one, between two epochs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graphft.capture.model_warnings import tell_nonfinite
from graphft.capture.weights import load_weights, saved_variables
from graphft.errors import GraphftError, UsageError
from graphft.ir import Program
from graphft.option_names import is_whole
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.metadata import MADE, SOURCE, made
from graphft.runtime.checkpoint.reshard import cut, whole_state
from graphft.runtime.checkpoint.store import CheckpointStore, checkpoints_of
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint
from graphft.runtime.interchange.job_state import JobState
from graphft.runtime.interchange.optimizer_state import optimizer_of
from graphft.runtime.loop import read_check_point
from graphft.transpiler import Job
from graphft.transpiler.layout import assemble


class Part:
    """A state that is there already, as an object that is saved."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state


def as_dict(found: JobState | None, job: Job) -> dict[str, Any]:
    """What a Trainer's `state_dict` returns; None: as the run begins."""
    if found is None:
        shards = [job.pserver_program(i).values for i in range(job.config.pservers)]
        return {"epoch": 0, "step": 0, "model": assemble(job.trainer_program(), shards), "optimizer": {}}
    epoch = job.config.plan.pass_of(found.step)
    return {"epoch": epoch, "step": found.step, "model": found.model, "optimizer": found.optimizer}


def parts_of(state: Mapping[str, Any], found: JobState | None) -> dict[str, Part]:
    """What is saved of a trainer: model and optimizer as torch has them, where whatever reads them looks for them."""
    nothing: dict[str, Any] = {"state": {}, "param_groups": []}
    optimizer = nothing if found is None else optimizer_of(found).by_name()
    place = {"epoch": state["epoch"], "step": state["step"]}
    return {"model": Part(state["model"]), "optimizer": Part(optimizer), "trainer": Part(place)}


def state_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse. What a loop has saved has a model, too, and an optimizer whose state is another one's."""
    if "model" not in parts:
        raise UsageError(
            f"the checkpoint has no model, but {', '.join(parts)}",
            rule="no-checkpoint",
            help="give what save() of a Trainer was given",
        )
    place = parts.get("trainer")
    if not (isinstance(place, Mapping) and place.keys() == {"epoch", "step"} and "optimizer" in parts):
        return {"model": parts["model"]}  # a loop's own objects, whatever it calls them
    return {**place, "model": parts["model"], "optimizer": parts["optimizer"]["state"]}


def read_saved(path: str | os.PathLike[str], version: int | None) -> dict[str, Any]:
    """What `save` of a Trainer left. Raises UsageError for what it did not."""
    if not (version is None or is_whole(version, 0)):
        raise UsageError(
            f"version is {version!r}, expected a number", rule="option", help="leave it out for the newest"
        )
    if Path(path).is_file():
        raise UsageError(
            f"{path} is a file, and no folder that save() made",
            rule="no-checkpoint",
            help="load_state_dict(torch.load(path, weights_only=True)), or of safetensors.torch.load_file(path)",
        )
    found = read_check_point(path, version=version)
    if found is None:
        raise UsageError(
            f"there is no checkpoint in {path}", rule="no-checkpoint", help="give what was given to save()"
        )
    return state_of(found.states)


def split(state: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], Any]:
    """(model, optimizer) of what `Trainer.state_dict` returned, or of a model's own state_dict."""
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
    try:
        tell_nonfinite(load_weights(program, model), "in the state that is loaded")
    except GraphftError as error:
        what = "give the state of a model like this one: nothing was changed"
        raise GraphftError(error.message, rule=error.rule, help=what) from None
    told = f"has {', '.join(map(str, optimizer))}" if isinstance(optimizer, Mapping) else f"is {optimizer!r:.40}"
    states = list(optimizer.values()) if isinstance(optimizer, Mapping) else [None]
    if not all(
        isinstance(s, Mapping) and all(isinstance(v, Tensor) and not v.is_meta for v in s.values()) for s in states
    ):
        raise UsageError(
            f"the optimizer's state {told}, expected tensors by parameter and name",
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
        """`program`: what the job was made from, with values. An optimizer's state that is not given stays. Raises
        GraphftError[weights] if something does not fit, and [no-checkpoint]; nothing is changed."""
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
        whole, rest = whole_state(job, _read(store, newest, job.config.pservers))
        _check_fixed(program, values, whole)
        for variable in saved_variables(program):
            if variable.name in whole:
                whole[variable.name][""] = values[variable.name].reshape(whole[variable.name][""].shape)
        for name, states in optimizer.items():
            _replace_optimizer(name, whole.get(name, {}), states, program.values[name].shape if name in whole else ())
        return Replacement(job, store, newest, cut(job, whole, rest))

    def write(self) -> Manifest:
        """All but the manifest that makes it count: that is for `put_in_place`. No process of the job may be there.
        Raises GraphftError[storage]; nothing is changed then."""
        generation, step, count = self.store.latest_generation() + 1, self.newest.step, len(self.shards)
        by = made(self.job.fingerprint, **{SOURCE: f"load_state_dict, at {self.newest.directory}"})
        try:
            self.store.mark_loaded(self.job.run_id)
            parts = [self.store.write_part(generation, step, i, count, each) for i, each in enumerate(self.shards)]
        except OSError as error:
            raise self._unwritten(error, "nothing was changed: make room there, and call it again") from error
        return Manifest(generation, step, self.job.run_id, tuple(parts), {**self.newest.meta, MADE: by})

    def put_in_place(self, manifest: Manifest) -> None:
        """The job goes on from it when its etcd knows of no other. Raises GraphftError[storage]."""
        try:
            self.store.write_manifest(manifest)
        except OSError as error:  # it may lie there nevertheless: after its rename, or a request without an answer
            known = "nothing was changed" if self._take_back(manifest) else "whether the new state counts is unknown"
            raise self._unwritten(error, f"{known}: make room there, and call it again") from error
        with contextlib.suppress(OSError):  # this one is of the highest generation: the others do not count
            self.store.discard([d for d in self.store.directories() if d != manifest.directory])

    def _take_back(self, manifest: Manifest) -> bool:
        """Deletes a checkpoint from which no process goes on yet. Returns whether it is known to be none any more."""
        with contextlib.suppress(OSError):
            self.store.discard([manifest.directory])
            return not self.store.has_manifest(manifest.directory)
        return False

    def _unwritten(self, error: OSError, help: str) -> GraphftError:
        what = f"the new state cannot be written to {self.store.where('')}: {error}"
        return GraphftError(what, rule="storage", help=help)


def _read(store: CheckpointStore, newest: Manifest, shards: int) -> list[dict[str, Tensor]]:
    """Raises GraphftError[checkpoint] if it is damaged."""
    try:
        return [store.read_part(newest, shard)[0] for shard in range(shards)]
    except DamagedCheckpoint as error:
        raise GraphftError(
            f"the state cannot take the place of that of step {newest.step}, which is damaged: {error.message}",
            rule="checkpoint",
            help="nothing was changed: train() another epoch, which goes on from an older one; or begin a new run with "
            "these values: init_from= of the Trainer, and another name=",
        ) from error


def _check_fixed(program: Program, values: Mapping[str, Tensor], whole: Mapping[str, Any]) -> None:
    """Raises GraphftError for a change of what no checkpoint holds."""
    fixed = [v.name for v in saved_variables(program) if v.name not in whole]
    if changed := [name for name in fixed if not values[name].equal(program.values[name])]:
        raise GraphftError(
            f"{', '.join(changed[:5])} would change, and is no part of the checkpoints: it is frozen, or a constant",
            rule="weights",
            help="begin a new run with these values: init_from= of the Trainer, and another name=",
        )


def _replace_optimizer(name: str, there: dict[str, Tensor], states: Mapping[str, Tensor], shape: Sequence[int]) -> None:
    """`shape`: the parameter's, and that of what the optimizer keeps for each of its elements."""
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
