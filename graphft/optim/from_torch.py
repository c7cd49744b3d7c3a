"""A torch.optim instance as parameter groups of graphft's optimizers.

What a program would not compute as torch does is refused: options, hooks, a learning-rate scheduler.
"""

from __future__ import annotations

import gc
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_hooks
from torch.optim.lr_scheduler import LRScheduler

from graphft.errors import GraphftError
from graphft.ir import Kind, Program
from graphft.optim.optimizers import OPTIMIZERS, SCALAR_STATE, SGD, AdamW, Group, Optimizer
from graphft.optim.refused_scheduler import refused_scheduler

_UNSUPPORTED = ("capturable", "differentiable")


def groups_of(program: Program, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> list[Group]:
    """The groups of `optimizer`, with the names that `program` gives the parameters of `model`, and their state.

    Parameters that the program does not train (frozen ones) are left out, as torch skips them. Raises GraphftError
    for an optimizer or option that is not supported, and for a parameter that is not the model's.
    """
    if model is None:
        raise GraphftError(
            "minimize needs the model to find the parameters of a torch.optim instance",
            rule="optimizer-option",
            help="give minimize(..., model=model), the module of build()",
        )
    _refuse_attached(optimizer)
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False) if n in program.variables}
    groups = []
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise GraphftError(
                f"the optimizer holds parameters that are not in the program, of shapes {unknown}",
                rule="optimizer-option",
                help="build the program and the optimizer from the same model",
            )
        trained = {names[id(p)]: p for p in group["params"] if program.variables[names[id(p)]].kind is Kind.PARAM}
        spec = _options(optimizer, group)
        state = {f"{n}@{k}": v for n, p in trained.items() for k, v in _state(spec, optimizer.state.get(p, {})).items()}
        groups.append(Group(spec, tuple(trained), state))
    return groups


def options_of(optimizer: torch.optim.Optimizer) -> list[Optimizer]:
    """Those of each group. Raises GraphftError as `groups_of` does."""
    _refuse_attached(optimizer)
    return [_options(optimizer, group) for group in optimizer.param_groups]


def _options(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Optimizer:
    spec = next((c for c in OPTIMIZERS.values() if c.torch_class is type(optimizer)), None)
    if spec is None:
        raise GraphftError(
            f"optimizer {type(optimizer).__name__} is not supported",
            rule="optimizer-option",
            help=f"use one of {', '.join(c.__name__ for c in OPTIMIZERS.values())}",
        )
    refused = [name for name in _UNSUPPORTED if group.get(name)]
    if refused:
        raise GraphftError(
            f"{type(optimizer).__name__}: option {refused[0]} is not supported",
            rule="optimizer-option",
            help=f"leave {refused[0]} out; the program's ops are neither compiled nor differentiated",
        )
    if group.get("decoupled_weight_decay"):
        spec = AdamW
    return spec(**{f.name: _value(group[f.name]) for f in fields(spec)})


def _refuse_attached(optimizer: torch.optim.Optimizer) -> None:
    """Raises GraphftError if something changes the optimizer's steps that a program does not know of."""
    scheduler = _scheduler_of(optimizer)
    if scheduler:
        raise refused_scheduler(scheduler, "is attached to the optimizer; a program would not follow it")
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    hooks += [*torch_hooks._global_optimizer_pre_hooks.values(), *torch_hooks._global_optimizer_post_hooks.values()]
    if hooks:
        raise GraphftError(
            f"the optimizer has a step hook, {getattr(hooks[0], '__qualname__', type(hooks[0]).__name__)}; a program "
            "would not call it",
            rule="optimizer-option",
            help="remove the hook; clipping is an option of minimize, a schedule is given as lr",
        )


def _scheduler_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of the scheduler that is attached to `optimizer`; "" if there is none.

    Most leave `initial_lr` in the groups, which says nothing where `lr` is a schedule by now. ReduceLROnPlateau leaves
    nothing, but refers to its optimizer.
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), LRScheduler) and vars(candidate).get("optimizer") is optimizer:
            return type(candidate).__name__
    left = any(
        "initial_lr" in group and isinstance(group["lr"], (float, int, Tensor)) for group in optimizer.param_groups
    )
    return "which was deleted, and set initial_lr" if left else ""


def _value(option: Any) -> Any:
    if isinstance(option, (tuple, list)):
        return tuple(map(_value, option))
    return option.item() if isinstance(option, Tensor) else option


def _state(spec: Optimizer, state: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a parameter that torch has begun to train already."""
    begun = {k: state[k].detach().clone() for k in spec.state() if isinstance(state.get(k), Tensor)}
    if begun and isinstance(spec, SGD):  # torch tells the first step by the missing momentum buffer
        begun[SCALAR_STATE] = torch.ones(())
    if SCALAR_STATE in begun:
        begun[SCALAR_STATE] = begun[SCALAR_STATE].float().cpu()
    return begun
