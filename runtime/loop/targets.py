"""What a loop saves: objects by name that give their state, and take it back (the Stateful protocol)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Program
from graphft.runtime.executor import Executor, differences
from graphft.runtime.loop.state_codec import module_state

ELEMENTWISE = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"})
"""States of torch's optimizers that have the shape of their parameter; torch itself does not look."""


@runtime_checkable
class Stateful(Protocol):
    """As `torch.distributed.checkpoint.stateful.Stateful`: modules, optimizers, schedulers, StatefulDataLoader, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def targets_of(state: Any, main_program: Program | None = None) -> dict[str, Stateful]:
    """Returns what `save_check_point(state)` saves, by name. Raises UsageError[state] for what has no state."""
    if isinstance(state, Executor):
        if main_program is None:
            raise UsageError(
                "an Executor runs many programs, and main_program is not given",
                rule="state",
                help="say of which one: save_check_point(executor, status, path, main_program=program)",
            )
        return {main_program.name: state.stateful(main_program)}
    if main_program is not None:
        raise UsageError(
            f"main_program goes with an Executor, the state is a {type(state).__name__}",
            rule="state",
            help="give the executor; or leave main_program out",
        )
    named = dict(state) if isinstance(state, Mapping) else {"state": state}
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, Stateful) or isinstance(value, type):
            raise UsageError(
                f"state[{name!r}] is a {type(value).__name__}, which has no state_dict() and load_state_dict()",
                rule="state",
                help='give objects by name: {"model": model, "optimizer": optimizer}; a plain value goes into an '
                "object of yours with these two methods",
            )
    if not named:
        raise UsageError("there is no state to save", rule="state", help='give {"model": model, ...}')
    return named


def load_all(
    targets: Mapping[str, Stateful], states: Mapping[str, Any], optimizers: Mapping[str, str] | None = None
) -> None:
    """Gives each object its state. What does not fit is found before anything is changed, as far as that can be told;
    an object of the user's own that refuses is put back to what it was, with those before it. `optimizers`: of which
    class those were that were saved, by name. Raises GraphftError."""
    wrong = [f"{name} is not in the checkpoint" for name in targets if name not in states]
    wrong += [f"{name} is in the checkpoint, and not given" for name in states if name not in targets]
    for name in targets.keys() & states.keys():
        kind, own = (optimizers or {}).get(name), type(targets[name]).__name__
        wrong += [f"{name} was a {kind} when it was saved, and is a {own}"] if kind not in (None, own) else []
        wrong += [f"{name}: {text}" for text in _misfits(targets[name], states[name])]
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise GraphftError(
            f"the checkpoint does not fit: {shown}",
            rule="checkpoint-fit",
            help="give the objects that were saved, made as they were then; or load what fits: partial=True",
        )
    states = {name: with_tied(target, states[name]) for name, target in targets.items()}
    done: list[tuple[Stateful, Any]] = []
    # Those that are certain to take it come last: then nothing has to be put back that is large.
    for name in sorted(targets, key=lambda name: (_is_sure(targets[name]), name)):
        target = targets[name]
        before = None if _is_sure(target) else copy.deepcopy(target.state_dict())
        try:
            target.load_state_dict(states[name])
        except Exception as error:
            for changed, value in [*done, (target, before)]:
                if value is not None:
                    changed.load_state_dict(value)
            raise GraphftError(
                f"{name} does not take its state: {describe(error)}",
                rule="checkpoint-fit",
                help="give the object that was saved, made as it was then",
            ) from error
        done.append((target, before))


def fitting(
    targets: Mapping[str, Stateful],
    saved: Mapping[str, Any],
    optimizers: Mapping[str, str],
    parameters: Mapping[str, list[str]],
) -> tuple[dict[str, Any], list[str]]:
    """Returns what can be loaded into objects that are made otherwise than those that were saved, and what is left, in
    words: of a module the tensors that fit by name, shape and dtype, in a whole state in which the rest is as it is
    now; an optimizer's state if it is of the same class, and of a module that fits wholly; of other objects all.

    `optimizers`, `parameters`: classes, and names of parameters, of the optimizers that were saved. Raises
    GraphftError[checkpoint-fit] if nothing fits.
    """
    left = [f"{name} is not in the checkpoint" for name in targets if name not in saved]
    left += [f"{name} is in the checkpoint, and not given" for name in saved if name not in targets]
    there = {name: target for name, target in sorted(targets.items()) if name in saved}
    misfits = {name: _misfits(target, saved[name]) for name, target in there.items()}
    whole = [target for name, target in there.items() if isinstance(target, nn.Module) and not misfits[name]]
    found: dict[str, Any] = {}
    for name, target in there.items():
        state, wrong = saved[name], misfits[name]
        if isinstance(target, torch.optim.Optimizer):
            known = parameter_names(target, whole)
            same = known and parameters.get(name) == known and optimizers.get(name) == type(target).__name__
            wrong = wrong if same else ["it is another optimizer, or not of a module that fits wholly"]
        elif isinstance(target, LRScheduler) and _groups(state) != _groups(target.state_dict()):
            wrong.append("it is of an optimizer with another number of groups")
        left += [f"{name}: {text}" for text in wrong]
        if not wrong:
            found[name] = state
        elif isinstance(target, nn.Module) and isinstance(state, Mapping):
            own, given = target.state_dict(), with_tied(target, state)
            if fit := {n: v for n, v in given.items() if n in own and _kind(v) == _kind(own[n])}:
                found[name] = module_state({**own, **fit}, getattr(state, "_metadata", None))
    if not found:
        raise GraphftError(
            f"nothing of the checkpoint fits: {'; '.join(left[:5])}",
            rule="checkpoint-fit",
            help="is it the right path? graphft checkpoint show says what is in it",
        )
    return found, left


def _groups(scheduler: Mapping[str, Any]) -> int:
    """Returns the number of the optimizer's groups. Not every scheduler has base_lrs: SequentialLR has none."""
    return len(scheduler.get("_last_lr", ()))


def _kind(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, Tensor) else None


def parameter_names(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> list[str]:
    """Returns the names of its parameters, by their numbers, in the first module that has them all; [] if none has."""
    trained = [id(p) for group in optimizer.param_groups for p in group["params"]]
    for module in modules:
        names = {id(p): name for name, p in module.named_parameters()}
        if names.keys() >= set(trained):
            return [names[number] for number in trained]
    return []


def _is_sure(target: Stateful) -> bool:
    """True if what fits is taken: torch's own loading, of tensors alone."""
    if isinstance(target, nn.Module):
        own = type(target).load_state_dict is nn.Module.load_state_dict
        return own and all(isinstance(value, Tensor) for value in target.state_dict().values())
    return isinstance(target, torch.optim.Optimizer)


def with_tied(target: Stateful, state: Any) -> Any:
    """Returns a module's state, with each name of tied tensors of which it has one."""
    if not isinstance(target, nn.Module) or not isinstance(state, Mapping):
        return state
    own = _tensors(target.state_dict())
    memory = {name: (v.data_ptr(), v.dtype, v.shape, v.stride()) for name, v in own.items() if v.numel()}
    given = {memory[name]: state[name] for name in memory if name in state}
    missing = {name: given[place] for name, place in memory.items() if name not in state and place in given}
    return module_state({**state, **missing}, getattr(state, "_metadata", None)) if missing else state


def _misfits(target: Stateful, state: Any) -> list[str]:
    if isinstance(target, nn.Module):
        if not isinstance(state, Mapping):
            return ["it is no state_dict"]
        own, state = target.state_dict(), with_tied(target, state)
        others = [f"{name} is missing" for name in own if name not in state and not isinstance(own[name], Tensor)]
        others += [
            f"{name} is not expected" for name in state if name not in own and not isinstance(state[name], Tensor)
        ]
        return [*differences(_tensors(own), _tensors(state)), *others]
    if isinstance(target, torch.optim.Optimizer):
        return _misfits_of_optimizer(target, state)
    return []


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _misfits_of_optimizer(target: torch.optim.Optimizer, state: Any) -> list[str]:
    try:
        groups = [len(group["params"]) for group in state["param_groups"]]
        entries = dict(state["state"])
    except (KeyError, TypeError, ValueError):
        return ["it is no optimizer's state_dict"]
    own = [len(group["params"]) for group in target.param_groups]
    if groups != own:
        return [f"its groups have {groups} parameters, expected {own}"]
    shapes = [p.shape for group in target.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    place = dict(zip(numbers, shapes, strict=True))
    return [
        f"{key} of parameter {number} is {tuple(value.shape)}, the parameter {tuple(place[number])}"
        for number, entry in entries.items()
        if number in place
        for key, value in entry.items()
        if key in ELEMENTWISE and isinstance(value, Tensor) and value.shape != place[number]
    ]
