"""A torch.optim instance as parameter groups of graphft's optimizers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from graphft.errors import GraphftError
from graphft.ir import Kind, Program
from graphft.optim import OPTIMIZERS, SCALAR_STATE, SGD, AdamW, Group, Optimizer

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
    if "initial_lr" in group:
        raise GraphftError(
            "a torch.optim.lr_scheduler is attached to the optimizer; a program would not follow it",
            rule="optimizer-option",
            help="give the schedule as lr, in graphft's optimizer: see graphft.schedule",
        )
    if group.get("decoupled_weight_decay"):
        spec = AdamW
    return spec(**{f.name: _value(group[f.name]) for f in fields(spec)})


def _value(option: Any) -> Any:
    return option.item() if isinstance(option, Tensor) else option


def _state(spec: Optimizer, state: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a parameter that torch has begun to train already."""
    begun = {k: state[k].detach().clone() for k in spec.state() if isinstance(state.get(k), Tensor)}
    if begun and isinstance(spec, SGD):  # torch tells the first step by the missing momentum buffer
        begun[SCALAR_STATE] = torch.ones(())
    if SCALAR_STATE in begun:
        begun[SCALAR_STATE] = begun[SCALAR_STATE].float().cpu()
    return begun
