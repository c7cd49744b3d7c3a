"""What of a checkpoint fits objects that are made otherwise than those that were saved, for `partial=True`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from graphft.errors import GraphftError
from graphft.runtime.executor import ProgramState, differences
from graphft.runtime.loop.state_codec import module_state
from graphft.runtime.loop.targets import Stateful, module_of, parameter_names, with_tied


@dataclass
class Fitting:
    """`states`: for each object that takes anything, a whole state, in which what does not fit is as it is now.
    `left`: the rest, in words."""

    states: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def fitting(
    targets: Mapping[str, Stateful],
    saved: Mapping[str, Any],
    optimizers: Mapping[str, str],
    parameters: Mapping[str, list[str]],
) -> Fitting:
    """Tensors fit by name, shape and dtype; an optimizer's state by the names of the parameters that are loaded; other
    objects are given theirs. `optimizers`: the classes of those that were saved, `parameters`: the names of theirs.

    Raises GraphftError[checkpoint-fit] if nothing fits.
    """
    found = Fitting()
    found.left += [f"{name} is not in the checkpoint" for name in targets if name not in saved]
    found.left += [f"{name} is in the checkpoint, and not given" for name in saved if name not in targets]
    there = {name: target for name, target in targets.items() if name in saved}
    loaded: dict[int, set[str]] = {}
    """Of each module, by its identity."""
    for name, target in there.items():
        if isinstance(target, (nn.Module, ProgramState)):
            loaded[id(target)] = _take_tensors(found, name, target, saved[name])
    modules = [target for _, target in sorted(targets.items()) if isinstance(target, nn.Module)]
    for name, target in there.items():
        if isinstance(target, torch.optim.Optimizer):
            names, kind = parameter_names(target, modules), type(target).__name__
            if optimizers.get(name) != kind:
                was = optimizers.get(name, "something else")
                found.left.append(f"{name} was {was} when it was saved, and is {kind}")
            elif not names or name not in parameters:
                found.left.append(f"{name}: which parameters its states are of is not known without their module")
            else:
                mine = loaded.get(id(module_of(target, modules)), set())
                _take_optimizer(found, name, target, saved[name], parameters[name], names, mine)
        elif isinstance(target, LRScheduler) and _groups(target.state_dict()) != _groups(saved[name]):
            found.left.append(f"{name} is of an optimizer with another number of groups")
        elif not isinstance(target, (nn.Module, ProgramState)):
            found.states[name] = saved[name]
    if not found.states:
        raise GraphftError(
            f"nothing of the checkpoint fits: {'; '.join(found.left[:5])}",
            rule="checkpoint-fit",
            help="is it the right path? graphft checkpoint show says what is in it",
        )
    return found


def _take_tensors(found: Fitting, name: str, target: nn.Module | ProgramState, saved: Any) -> set[str]:
    """Names of those that fit."""
    own = target.state_dict()
    if not isinstance(saved, Mapping) or not (isinstance(target, nn.Module) or own.keys() == saved.keys()):
        found.left.append(f"{name} was something else when it was saved")
        return set()
    if isinstance(target, nn.Module):
        values, given = own, with_tied(target, saved)
    else:
        values, given = own["values"], saved["values"]
    tensors, others = _tensors(values), _tensors(given)
    found.left += [f"{name}: {text}" for text in differences(tensors, others)]
    taken = {
        n: v for n, v in others.items() if n in tensors and (v.dtype, v.shape) == (tensors[n].dtype, tensors[n].shape)
    }
    if taken:
        more = {n: v for n, v in given.items() if n in values and n not in tensors and n not in others}
        merged = module_state({**values, **taken, **more}, getattr(saved, "_metadata", None))
        found.states[name] = merged if isinstance(target, nn.Module) else {"values": merged, "runs": saved["runs"]}
    return set(taken)


def _groups(scheduler: Mapping[str, Any]) -> int:
    """The number of the optimizer's groups. Not every scheduler has base_lrs: SequentialLR has none."""
    return len(scheduler.get("_last_lr", ()))


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _take_optimizer(
    found: Fitting,
    name: str,
    target: torch.optim.Optimizer,
    saved: Any,
    saved_names: list[str],
    names: list[str],
    loaded: set[str],
) -> None:
    own = target.state_dict()
    entries = dict(zip(saved_names, (saved["state"].get(n) for n in _numbers(saved)), strict=True))
    states = dict(own["state"])
    for number, parameter in zip(_numbers(own), names, strict=True):
        if parameter not in loaded:
            found.left.append(f"{name}: the state of {parameter}, which is not loaded")
        elif parameter not in entries:
            found.left.append(f"{name} has no state of {parameter}")
        elif entries[parameter] is not None:
            states[number] = entries[parameter]
    groups = own["param_groups"]
    if len(groups) == len(saved["param_groups"]):
        pairs = zip(groups, saved["param_groups"], strict=True)
        own_parts = ("params", "param_names")
        groups = [
            {**mine, **theirs, **{part: mine[part] for part in own_parts if part in mine}} for mine, theirs in pairs
        ]
    else:
        found.left.append(f"{name}: the options of its {len(saved['param_groups'])} groups, here are {len(groups)}")
    found.states[name] = {**saved, "state": states, "param_groups": groups}


def _numbers(state: Any) -> list[Any]:
    """Of its parameters, in their order."""
    return [number for group in state["param_groups"] for number in group["params"]]
