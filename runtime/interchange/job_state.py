"""What a job's folder holds of its model and optimizer: whole tensors, whatever pservers held them in slices."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError
from graphft.ir import Kind
from graphft.optim import SCALAR_STATE
from graphft.runtime.checkpoint.store import CheckpointStore, DamagedCheckpoint, Manifest
from graphft.runtime.checkpoint.stored_checkpoints import checkpoints_of
from graphft.transpiler import Job
from graphft.transpiler.assemble import assemble
from graphft.transpiler.layout import slices_of

log = logging.getLogger("graphft")

LOOKS, LOOK_SECONDS = 4, 0.1
"""A running job deletes old checkpoints: what is gone when it is read is looked for again."""


@dataclass(frozen=True)
class JobState:
    """`step`: async: of the shard that has applied the fewest batches. `model`: its state_dict. `optimizer`: by
    parameter, its state by the names of torch.optim."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]


def read_job(folder: Path, step: int | None = None) -> JobState:
    """From the newest checkpoint in a job's folder that is whole, or from that of `step`. The job may be running, on
    any machine.

    Raises UsageError[no-checkpoint] if there is none (yet), DamagedCheckpoint if none is whole.
    """
    job = Job.load(folder)
    for left in reversed(range(LOOKS)):
        try:
            reached, shards = _read(job, folder, step)
            return JobState(reached, assemble(job.trainer_program(), shards), _optimizer(job, shards))
        except GraphftError:  # the job may have replaced what was looked at just now
            if not left:
                raise
            time.sleep(LOOK_SECONDS)
    raise AssertionError


def _read(job: Job, folder: Path, step: int | None) -> tuple[int, list[dict[str, Tensor]]]:
    """The step, and what each shard held."""
    everything = range(job.config.pservers)
    store = checkpoints_of(folder)
    there = [m for m in store.manifests() if m.run == job.run_id and step in (None, m.step)]
    if there:
        return _newest_whole(store, there, everything)
    if step is not None or job.config.sync:
        what = (
            "checkpoint yet"
            if step is None
            else f"checkpoint of step {step}" + " of all shards" * (not job.config.sync)
        )
        raise _none(folder, what)
    found = []  # async, before the end: each shard has its own
    for shard in everything:
        store = checkpoints_of(folder, shard)
        own = [m for m in store.manifests() if m.run == job.run_id]
        if not own:
            raise _none(folder, f"checkpoint yet of shard {shard}")
        found.append(_newest_whole(store, own, [shard]))
    return min(reached for reached, _ in found), [tensors for _, (tensors,) in found]


def _newest_whole(
    store: CheckpointStore, manifests: Sequence[Manifest], shards: Sequence[int]
) -> tuple[int, list[dict[str, Tensor]]]:
    """Step and tensors of the first that can be read. Raises DamagedCheckpoint if none can."""
    damaged: list[DamagedCheckpoint] = []
    for manifest in manifests:
        try:
            tensors = [store.read_part(manifest, shard)[0] for shard in shards]
        except DamagedCheckpoint as error:
            log.error("%s", error.message)
            damaged.append(error)
            continue
        if damaged:
            log.error("going back to the checkpoint of step %d, the newest that is whole", manifest.step)
        return manifest.step, tensors
    raise DamagedCheckpoint(
        f"none of the {len(damaged)} checkpoints is whole: {damaged[0].message}",
        rule="checkpoint",
        help="let the job run on: it goes back to its initial values",
    )


def _none(folder: Path, what: str) -> UsageError:
    return UsageError(
        f"{folder} has no {what}",
        rule="no-checkpoint",
        help=f"`graphft checkpoint list {folder}` says which there are, `graphft status` when the next one comes",
    )


def _optimizer(job: Job, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for v in job.trainer_program().of_kind(Kind.PARAM):
        slices = slices_of(v)
        prefix = f"{slices[0].name}@"
        keys = [
            n.removeprefix(prefix)
            for n in shards[slices[0].shard]
            if n.startswith(prefix) and "@" not in n[len(prefix) :]
        ]
        state = {}
        for key in keys:
            parts = [shards[s.shard][f"{s.name}@{key}"] for s in slices]
            if key == SCALAR_STATE:
                state[key] = parts[0]
            else:
                state[key] = torch.cat([p.reshape(-1) for p in parts]).reshape([int(d) for d in v.shape])
        if state:
            found[v.name] = state
    return found


def _other_kinds(optimizer: torch.optim.Optimizer, given: Mapping[int, Mapping[str, Tensor]]) -> list[str]:
    """Whether it keeps another state than what is given: looked up by a step of its like with small parameters."""
    for group in optimizer.param_groups:
        given_here = [given[id(p)] for p in group["params"] if id(p) in given]
        if not given_here:
            continue
        small = torch.nn.Parameter(torch.ones([1] * group["params"][0].ndim, dtype=group["params"][0].dtype))
        small.grad = torch.ones_like(small)
        try:
            like = type(optimizer)([{**group, "params": [small]}])  # type: ignore[call-arg]
            like.step()
        except Exception:  # an optimizer that needs more to be made: it is left to itself
            continue
        kept = {k for k, v in like.state[small].items() if isinstance(v, Tensor)} - {SCALAR_STATE}
        held = given_here[0].keys() - {SCALAR_STATE}
        if kept != held:
            words = [", ".join(sorted(kinds)) or "nothing" for kinds in (held, kept)]
            return [f"the job's optimizer keeps {words[0]}, a {type(optimizer).__name__} as this one {words[1]}"]
    return []


def load_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, source: str | Path) -> int:
    """Gives `optimizer` the state that the job in folder `source` had at its newest checkpoint; returns its step.

    `model` is what the optimizer trains; its parameters have the job's names and shapes. Options of the groups (lr,
    betas) stay as they are. With the model's weights (`load_into(model, read_weights(source))`) training goes on as the
    job would: in plain torch, or in a new job (`minimize(program, optimizer, model=model)`), with any number of
    pservers.

    Raises GraphftError[optimizer-state] if names, shapes or kinds of state differ; nothing is changed then.
    """
    state = read_job(Path(source))
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False) if n in state.optimizer}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    problems = [
        f"a parameter of shape {tuple(p.shape)} has no state" for p in trained if id(p) not in names and p.requires_grad
    ]
    given = {id(p): state.optimizer[names[id(p)]] for p in trained if id(p) in names}
    for p in trained:
        for key, value in given.get(id(p), {}).items():
            if key != SCALAR_STATE and value.shape != p.shape:
                problems.append(f"{names[id(p)]}@{key} is {tuple(value.shape)}, the parameter {tuple(p.shape)}")
            elif key != SCALAR_STATE and value.dtype != p.dtype:
                problems.append(f"{names[id(p)]}@{key} is {value.dtype}, the parameter {p.dtype}")
    problems += _other_kinds(optimizer, given)
    unused = sorted(state.optimizer.keys() - {names[i] for i in given})
    problems += [f"{name} is not among the optimizer's parameters" for name in unused]
    if not state.optimizer:
        problems = ["it holds no state of an optimizer (SGD without momentum has none; local steps keep theirs)"]
    if problems:
        raise GraphftError(
            f"the optimizer's state in {source} does not fit: {'; '.join(problems[:5])}"
            + f"; and {len(problems) - 5} more" * (len(problems) > 5),
            rule="optimizer-state",
            help="make model and optimizer as the job's script does",
        )
    for p in trained:
        values = given.get(id(p), {})
        if isinstance(optimizer, torch.optim.SGD):  # torch has no count, and no buffer before the first step
            values = (
                {}
                if float(values.get(SCALAR_STATE, 1)) == 0
                else {k: v for k, v in values.items() if k != SCALAR_STATE}
            )
        optimizer.state[p] = {
            k: v.detach().clone().to("cpu" if k == SCALAR_STATE else p.device) for k, v in values.items()
        }
    return state.step
