"""What training goes on with: a model's weights and the state of its optimizer, from wherever they lie together.

The names are those of torch: `get_optimizer_state_dict` has the state by the names of parameters, `state_dict()` of an
optimizer by their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError
from graphft.optim.optimizers import SCALAR_STATE, SGD, Optimizer
from graphft.runtime.checkpoint.manifest import is_directory
from graphft.runtime.coordination.runs import weights_source
from graphft.runtime.fs import file_system
from graphft.runtime.interchange.distributed import local_path, read_distributed
from graphft.runtime.interchange.distributed_metadata import METADATA
from graphft.runtime.interchange.job_state import JobState, job_folder, read_job
from graphft.runtime.loop.check_points import CheckPoints
from graphft.runtime.loop.snapshot import PARAMETERS, Found

_SOURCES = "the folder or storage of a job, what save_check_point saved, or a directory of torch.distributed.checkpoint"


@dataclass(frozen=True)
class OptimizerState:
    """`state`: by the names of parameters, or (`numbered`) by their numbers in the optimizer's groups; `groups`: their
    options, with the names (or numbers) as `params`; None where they are not known. `step`: of the training."""

    step: int
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]] | None = None
    numbered: bool = False

    def by_name(self) -> dict[str, Any]:
        """As torch's `get_optimizer_state_dict` has it. Raises GraphftError where the names are not known."""
        if self.numbered or self.groups is None:
            raise GraphftError(
                "the names of the optimizer's parameters are not known",
                rule="optimizer-state",
                help="save the module that has them all with the optimizer: save_check_point({'model': model, "
                "'optimizer': optimizer}, ...)",
            )
        return {"state": {n: entry for n, entry in self.state.items() if entry}, "param_groups": self.groups}


def read_optimizer(source: str | os.PathLike[str], name: str = "optimizer") -> OptimizerState:
    """From a job, what `save_check_point` saved as `name`, or a directory of `torch.distributed.checkpoint`.

    Raises GraphftError for what is none of them, is damaged, or has no optimizer of that name; OSError where the
    storage fails.
    """
    fs, path = file_system(os.fspath(source))
    torchs = fs.size(path) is None and fs.size(f"{path}/{METADATA}") is not None
    found = _from_torch(source, name) if torchs else read_training(source, "", name)[1]
    if not found.state:
        raise GraphftError(
            f"{source} holds no state of an optimizer",
            rule="optimizer-state",
            help="SGD without momentum has none, and local steps keep theirs",
        )
    return found


def read_training(
    source: str | os.PathLike[str], model: str, optimizer: str, version: int | None = None
) -> tuple[dict[str, Tensor], OptimizerState]:
    """A model's `state_dict` and its optimizer's state, of one checkpoint: of a job, or of what `save_check_point`
    saved as `model` ("": not wanted) and `optimizer`. `version`: of a job, the step; by default the newest that is
    whole.

    Raises as `read_optimizer`.
    """
    source = weights_source(source)
    with job_folder(source, whole=True) as folder:
        state = read_job(folder, version) if folder is not None else None
    if state is not None:
        return state.model, optimizer_of(state)
    fs, path = file_system(os.fspath(source))
    if fs.size(path) is None and any(map(is_directory, fs.list_dirs(path))):
        return _of_loop(source, model, optimizer, version)
    raise UsageError(f"{source} has no state of an optimizer", rule="optimizer-state", help=f"give {_SOURCES}")


def optimizer_of(job: JobState) -> OptimizerState:
    """As torch has it."""
    together: dict[Optimizer, list[str]] = {}
    for name, update in job.updates.items():
        together.setdefault(update, []).append(name)
    groups = [{**_options(update), "params": names} for update, names in together.items()]
    state = {n: _as_torch_has_it(job.updates[n], values) for n, values in job.optimizer.items()}
    return OptimizerState(job.step, state, groups)


def _options(update: Optimizer) -> dict[str, Any]:
    """As torch's own optimizer has them in a group."""
    given = {f.name: getattr(update, f.name) for f in fields(update)}
    (group,) = update.torch_class([torch.empty(0)], **given).param_groups
    return {key: value for key, value in group.items() if key != "params"}


def _as_torch_has_it(update: Optimizer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """torch's SGD has no count, and no buffer before the first step."""
    if not isinstance(update, SGD):
        return dict(values)
    if float(values.get(SCALAR_STATE, 1)) == 0:
        return {}
    return {key: value for key, value in values.items() if key != SCALAR_STATE}


def _of_loop(
    source: str | os.PathLike[str], model: str, optimizer: str, version: int | None
) -> tuple[dict[str, Tensor], OptimizerState]:
    found = CheckPoints(source).newest(version)
    if found is None:
        raise UsageError(f"{source} has no checkpoint that is committed", rule="optimizer-state", help="save one first")
    weights = found.states.get(model) if model else {}
    saved = found.states.get(optimizer)
    if (
        not isinstance(weights, Mapping)
        or not isinstance(saved, Mapping)
        or not {"state", "param_groups"} <= saved.keys()
    ):
        missing = f"optimizer {optimizer!r}" if isinstance(weights, Mapping) else f"model {model!r}"
        raise UsageError(
            f"checkpoint {found.version} of {source} has no {missing}",
            rule="optimizer-state",
            help=f"name it: it has {', '.join(sorted(found.states))}",
        )
    tensors = {str(n): value for n, value in weights.items() if isinstance(value, Tensor)}
    return tensors, _of_state_dict(found, saved, optimizer)


def _of_state_dict(found: Found, saved: Mapping[str, Any], optimizer: str) -> OptimizerState:
    """By names, if the model that the optimizer trains was saved with it."""
    names = found.manifest.meta.get(PARAMETERS, {}).get(optimizer)

    def named(number: Any) -> str:
        return str(number) if names is None else str(names[number])

    state = {named(number): dict(entry) for number, entry in saved["state"].items()}
    groups = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [named(n) for n in group["params"]]}
        for group in saved["param_groups"]
    ]
    numbered = names is None and all(name.isdecimal() for name in state)  # a Trainer's has names
    return OptimizerState(found.status.step, state, groups, numbered=numbered)


def _from_torch(source: str | os.PathLike[str], name: str) -> OptimizerState:
    """Of a directory of `torch.distributed.checkpoint`, however it was put there: by names or numbers, nested or flat.
    Options of groups are pickles there, and not read."""
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

    `source` is a job's folder or storage, or what `save_check_point` saved, at the newest checkpoint that is whole; or
    a directory of `torch.distributed.checkpoint`. In the last two, `name` is what the optimizer was saved as. `model`
    is what the optimizer trains; its parameters have the names and shapes that were saved. Options of the groups (lr,
    betas) stay as they are. With the model's weights (`load_into(model, read_weights(source))`) training goes on as it
    would have there: in plain torch, or in a new job (`minimize(program, optimizer, model=model)`), with any number of
    pservers.

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
        raise GraphftError(
            f"the optimizer's state in {source} does not fit: {'; '.join(problems[:5])}"
            + f"; and {len(problems) - 5} more" * (len(problems) > 5),
            rule="optimizer-state",
            help="make model and optimizer as the script does that trained there",
        )
    for p in trained:
        values = given.get(id(p), {})
        optimizer.state[p] = {
            k: v.detach().clone().to("cpu" if k == SCALAR_STATE else p.device) for k, v in values.items()
        }
    return found.step


def _names(found: OptimizerState, model: torch.nn.Module, trained: list[Tensor]) -> dict[int, str]:
    """Of the parameters that have a state, the name or number that it has in `found`."""
    known = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n in found.state}
    if found.numbered and not known:
        known = {str(i): p for i, p in enumerate(trained) if str(i) in found.state}  # type: ignore[misc]
    return {id(p): n for n, p in known.items()}


def _differences(name: str, parameter: Tensor, values: Mapping[str, Tensor]) -> Iterator[str]:
    for key, value in values.items():
        if key != SCALAR_STATE and value.shape != parameter.shape:
            yield f"{name}@{key} is {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
        elif key != SCALAR_STATE and value.dtype != parameter.dtype:
            yield f"{name}@{key} is {value.dtype}, the parameter {parameter.dtype}"


def _other_kinds(optimizer: torch.optim.Optimizer, given: Mapping[int, Mapping[str, Tensor]]) -> list[str]:
    """Whether it keeps another state than what is given: looked up by a step of its like with small parameters."""
    for group in optimizer.param_groups:
        given_here = [given[id(p)] for p in group["params"] if given.get(id(p))]
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
            return [f"the saved optimizer keeps {words[0]}, a {type(optimizer).__name__} as this one {words[1]}"]
    return []
