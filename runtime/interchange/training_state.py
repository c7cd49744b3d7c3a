"""A model's weights and the state of its optimizer, whole, from wherever they lie together.

The names are those of torch: `get_optimizer_state_dict` has the state by the names of parameters, `state_dict()` of an
optimizer by their numbers.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError, listed
from graphft.ir import Kind, Program
from graphft.optim.optimizers import OPTIMIZERS, SCALAR_STATE, SGD, Optimizer
from graphft.runtime.checkpoint.manifest import is_directory
from graphft.runtime.checkpoint.reshard import whole_variables
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.job_files import fetch, is_url, stored_run
from graphft.runtime.coordination.runs import weights_source
from graphft.runtime.fs import file_system
from graphft.runtime.interchange.distributed import METADATA, local_path, read_distributed
from graphft.runtime.loop.check_points import CheckPoints
from graphft.runtime.loop.snapshot import PARAMETERS, Found
from graphft.transpiler.job import Job
from graphft.transpiler.layout import assemble
from graphft.transpiler.optimization import find_optimization, rates_at
from graphft.transpiler.record import RECORD

LOOKS, LOOK_SECONDS = 4, 0.1
"""A running job deletes old checkpoints: what is gone when it is read is looked for again."""


@dataclass(frozen=True)
class JobState:
    """`step`: async: of the shard that has applied the fewest batches. `model`: its state_dict. `optimizer`: by
    parameter, its state by the names of torch.optim. `updates`: by parameter, the optimizer and its options at that
    step."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    updates: dict[str, Optimizer]


@contextmanager
def job_folder(source: str | os.PathLike[str], *, whole: bool = False) -> Iterator[Path | None]:
    """Yields the folder of a job; of its storage a copy of its record (`whole`: and of its programs), for as long as
    this lasts; None for what is no job's. Raises GraphftError[storage]."""
    if not is_url(source):
        folder = Path(source)
        yield folder if (folder / RECORD).exists() else None
    elif not stored_run(url := os.fspath(source).rstrip("/")):
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
            fetch(url, Path(scratch, "job"), whole=whole)
            yield Path(scratch, "job")


def read_job(folder: Path, step: int | None = None) -> JobState:
    """Reads the newest checkpoint in a job's folder that is whole, or that of `step`. The job may be running, on
    any machine.

    Raises UsageError[no-checkpoint] if there is none (yet), DamagedCheckpoint if none is whole.
    """
    job = Job.load(folder)
    for left in reversed(range(LOOKS)):
        try:
            reached, shards = _read(job, folder, step)
            model, optimizer = assemble(job.trainer_program(), shards), _optimizer(job, shards)
            return JobState(reached, model, optimizer, _updates(job.source, reached))
        except GraphftError:  # the job may have replaced what was looked at just now
            if not left:
                raise
            time.sleep(LOOK_SECONDS)
    raise AssertionError


def _read(job: Job, folder: Path, step: int | None) -> tuple[int, list[dict[str, Tensor]]]:
    """Returns the step, and what each shard held."""
    everything = range(job.config.pservers)
    found = checkpoints_of(folder).read_newest(job.run_id, everything, step)
    if found is not None:
        return found[0].step, found[1]
    if step is None and not job.config.sync:  # async, before the end: each shard has its own
        own = [checkpoints_of(folder, shard).read_newest(job.run_id, [shard]) for shard in everything]
        there = [each for each in own if each is not None]
        if len(there) == len(own):
            return min(manifest.step for manifest, _ in there), [tensors for _, (tensors,) in there]
    what = "yet" if step is None else f"of step {step}"
    help = f"`graphft checkpoint list {folder}` says which there are, `graphft status` when the next one comes"
    raise UsageError(f"{folder} has no checkpoint {what}", rule="no-checkpoint", help=help)


def _optimizer(job: Job, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    whole, found = whole_variables(job, shards)[0], {}
    for v in job.trainer_program().of_kind(Kind.PARAM):
        shape = [int(d) for d in v.shape]
        state = {key: value if value.dim() == 0 else value.reshape(shape) for key, value in whole[v.name].items()}
        if state := {key.removeprefix("@"): value for key, value in state.items() if key}:
            found[v.name] = state
    return found


def _updates(program: Program, step: int) -> dict[str, Optimizer]:
    found, rates = {}, rates_at(program, step)
    for name, op in find_optimization(program.blocks["step"]).updates.items():
        found[name] = OPTIMIZERS[op.type](lr=rates[op.operand("lr").name], **op.attrs)
    return found


# -- optimizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerState:
    """`state`: by the names of parameters, or (`numbered`) by their numbers in the optimizer's groups. `step`: of the
    training."""

    step: int
    state: dict[str, dict[str, Any]]
    numbered: bool = False


def read_optimizer(source: str | os.PathLike[str], name: str = "optimizer") -> OptimizerState:
    """Returns the state in a job, what `save_check_point` saved as `name`, or a `torch.distributed.checkpoint`.

    Raises GraphftError for what is none of them, is damaged, or has no optimizer of that name; OSError where the
    storage fails.
    """
    source = weights_source(source)
    with job_folder(source, whole=True) as folder:
        job = read_job(folder) if folder is not None else None
    fs, path = file_system(os.fspath(source))
    if job is not None:
        found = OptimizerState(job.step, optimizer_of(job)["state"])
    elif fs.size(path) is None and fs.size(f"{path}/{METADATA}") is not None:
        found = _from_torch(source, name)
    elif fs.size(path) is None and any(map(is_directory, fs.ls_dir(path))):
        found = _of_loop(source, name)
    else:
        help = "give a job, what save_check_point saved, or a directory of torch.distributed.checkpoint"
        raise UsageError(f"{source} has no state of an optimizer", rule="optimizer-state", help=help)
    if not found.state:
        help = "SGD without momentum has none, and local steps keep theirs"
        raise GraphftError(f"{source} holds no state of an optimizer", rule="optimizer-state", help=help)
    return found


def optimizer_of(job: JobState) -> dict[str, Any]:
    """Returns what torch's `get_optimizer_state_dict` does, by the names of parameters."""
    together: dict[Optimizer, list[str]] = {}
    for name, update in job.updates.items():
        together.setdefault(update, []).append(name)
    groups = [{**_options(update), "params": names} for update, names in together.items()]
    state = {n: _as_torch_has_it(job.updates[n], values) for n, values in job.optimizer.items()}
    return {"state": {n: entry for n, entry in state.items() if entry}, "param_groups": groups}


def _options(update: Optimizer) -> dict[str, Any]:
    """Returns the options as torch's own optimizer has them in a group."""
    given = {f.name: getattr(update, f.name) for f in fields(update)}
    (group,) = update.torch_class([torch.empty(0)], **given).param_groups
    return {key: value for key, value in group.items() if key != "params"}


def _as_torch_has_it(update: Optimizer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of one parameter: torch's SGD has no count, and no buffer before the first step."""
    if not isinstance(update, SGD):
        return dict(values)
    if float(values.get(SCALAR_STATE, 1)) == 0:
        return {}
    return {key: value for key, value in values.items() if key != SCALAR_STATE}


def newest_of_loop(source: str | os.PathLike[str], version: int | None) -> Found:
    """Reads the newest whole version that a loop saved, or that one. Raises UsageError if there is none."""
    if (found := CheckPoints(source).newest(version)) is None:
        raise UsageError(f"{source} has no checkpoint that is committed", rule="no-checkpoint", help="save one first")
    return found


def saved_as(found: Found, name: str, *keys: str) -> Mapping[str, Any]:
    """Returns the state of that name, which has these keys. Raises UsageError if there is none."""
    state = found.states.get(name)
    if not isinstance(state, Mapping) or not state.keys() >= {*keys}:
        help = f"name it (name=, --object): it has {', '.join(sorted(found.states))}"
        raise UsageError(f"checkpoint {found.version} has no {name!r}", rule="weights", help=help)
    return state


def _of_loop(source: str | os.PathLike[str], optimizer: str) -> OptimizerState:
    found = newest_of_loop(source, None)
    saved = saved_as(found, optimizer, "state", "param_groups")["state"]
    names = found.manifest.meta.get(PARAMETERS, {}).get(optimizer)
    state = {str(number if names is None else names[number]): dict(entry) for number, entry in saved.items()}
    numbered = names is None and all(name.isdecimal() for name in state)  # a Trainer's has names
    return OptimizerState(found.status.step, state, numbered)


def _from_torch(source: str | os.PathLike[str], name: str) -> OptimizerState:
    """Reads a directory of `torch.distributed.checkpoint`, however the state was put there: by names or numbers, nested
    or flat. Options of groups are pickles there, and not read."""
    state: dict[str, dict[str, Any]] = {}
    for place, value in read_distributed(local_path(source), name).items():
        if place.startswith("state."):
            parameter, _, key = place.removeprefix("state.").rpartition(".")
            state.setdefault(parameter, {})[key] = value
    steps = [int(entry[SCALAR_STATE]) for entry in state.values() if SCALAR_STATE in entry]
    return OptimizerState(max(steps, default=0), state, numbered=all(n.isdecimal() for n in state))


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, source: str | os.PathLike[str], name: str = "optimizer"
) -> int:
    """Gives `optimizer` the state that was saved in `source`; returns the step of it.

    `source` is a job, what `save_check_point` saved, or a directory of `torch.distributed.checkpoint`; in the last two,
    `name` is what the optimizer was saved as. `model` is what the optimizer trains. Options of the groups stay
    as they are. With the model's weights (`load_into(model, read_weights(source))`) training goes on as it would have
    there: in plain torch, or in a new job (`minimize(program, optimizer, model=model)`).

    Raises GraphftError[optimizer-state] if names, shapes or kinds of state differ; nothing is changed then.
    """
    found = read_optimizer(source, name)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    names = _names(found, model, trained)
    given = {i: {k: v for k, v in found.state[n].items() if isinstance(v, Tensor)} for i, n in names.items()}
    problems = [
        f"a parameter of shape {tuple(p.shape)} has no state" for p in trained if id(p) not in names and p.requires_grad
    ]
    problems += [text for p in trained if id(p) in names for text in _differences(names[id(p)], p, given[id(p)])]
    problems += _other_kinds(optimizer, given)
    unused = sorted(found.state.keys() - {names[id(p)] for p in trained if id(p) in names})
    problems += [f"{name} is not among the optimizer's parameters" for name in unused]
    if problems:
        text = f"the optimizer's state in {source} does not fit: {listed(problems, '; ')}"
        raise GraphftError(text, rule="optimizer-state", help="make model and optimizer as the script does")
    for p in trained:
        values = given.get(id(p), {})
        optimizer.state[p] = {
            k: v.detach().clone().to("cpu" if k == SCALAR_STATE else p.device) for k, v in values.items()
        }
    return found.step


def _names(found: OptimizerState, model: torch.nn.Module, trained: list[Tensor]) -> dict[int, str]:
    """Returns, by parameter that has a state, the name or number that it has in `found`."""
    known = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n in found.state}
    if found.numbered and not known:
        known = {str(i): p for i, p in enumerate(trained) if str(i) in found.state}  # type: ignore[misc]
    return {id(p): n for n, p in known.items()}


def _differences(name: str, parameter: Tensor, values: Mapping[str, Tensor]) -> Iterator[str]:
    for key, value in values.items():
        for what in ("shape", "dtype") if key != SCALAR_STATE else ():
            if (found := getattr(value, what)) != (wanted := getattr(parameter, what)):
                yield f"{name}@{key} is {found}, the parameter {wanted}"


def _other_kinds(optimizer: torch.optim.Optimizer, given: Mapping[int, Mapping[str, Tensor]]) -> Iterator[str]:
    """Yields where it keeps another state than what is given: a step of its like with a small parameter tells."""
    for group in optimizer.param_groups:
        held = next((given[id(p)].keys() - {SCALAR_STATE} for p in group["params"] if given.get(id(p))), None)
        if held is None:
            continue
        small = torch.nn.Parameter(torch.ones([1] * group["params"][0].ndim, dtype=group["params"][0].dtype))
        small.grad = torch.ones_like(small)
        try:
            like = type(optimizer)([{**group, "params": [small]}])  # type: ignore[call-arg]
            like.step()
        except Exception:  # an optimizer that needs more to be made: it is left to itself
            continue
        kept = {k for k, v in like.state[small].items() if isinstance(v, Tensor)} - {SCALAR_STATE}
        if kept != held:
            yield f"the saved optimizer keeps {sorted(held)}, a {type(optimizer).__name__} as this one {sorted(kept)}"
