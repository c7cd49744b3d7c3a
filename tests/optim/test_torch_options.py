"""All of torch's public optimizers and options: each is computed as by torch, or refused, never ignored.

The tables below name every one that torch has: a new one fails the tests until it is in a table.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler, swa_utils
from torch.optim import optimizer as torch_hooks

import graphft
from graphft.errors import GraphftError
from tests.support.eager import in_program, in_torch

SUPPORTED = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")
NO_OPTIMIZER = ("Optimizer", "lr_scheduler", "swa_utils", "swap_in_optimizer_params_and_state")
BASE: dict[str, dict[str, Any]] = {
    "nesterov": {"momentum": 0.9},
    "dampening": {"momentum": 0.9},
    "amsgrad": {"betas": (0.5, 0.1)},
}
"""Options that another needs beside it to have an effect."""
COMPUTED: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "dampening": 0.5,
    "weight_decay": 0.3,
    "nesterov": True,
    "maximize": True,
    "betas": (torch.tensor(0.5), torch.tensor(0.6)),
    "eps": 0.1,
    "amsgrad": True,
    "decoupled_weight_decay": True,
    "lr_decay": 0.5,
    "initial_accumulator_value": 0.3,
    "alpha": 0.5,
    "centered": True,
}
REFUSED = {"capturable": True, "differentiable": True}
IMPLEMENTATION = {"foreach": True, "fused": True}
"""Options that choose among implementations of the same step."""

SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o)], []),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.1),
}

X = torch.linspace(-1, 1, 12).reshape(4, 3)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


@functools.cache
def captured() -> graphft.Program:
    return graphft.build(line(), loss_fn, {"x": (None, 3)})


def line() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def options_of(name: str) -> list[str]:
    return [n for n in inspect.signature(getattr(optim, name)).parameters if n != "params"]


def cases(*tables: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name in SUPPORTED:
        for option in options_of(name):
            for table in tables:
                if option in table:
                    yield name, option, table[option]


def make(name: str, model: nn.Module, **options: Any) -> optim.Optimizer:
    cls = getattr(optim, name)
    return cls(model.parameters(), **{"lr": 0.1, **options})


@functools.cache
def after_four_steps(name: str, **options: Any) -> Tensor:
    """The weights, trained by graphft."""
    model, program = line(), captured().clone()
    graphft.minimize(program, make(name, model, **options), model=model)
    return in_program(program, [{"x": X}] * 4)[1]["weight"]


def eager(name: str, **options: Any) -> Tensor:
    """The weights, trained by torch."""
    model = line()
    in_torch(model, loss_fn, [{"x": X}] * 4, lambda model: make(name, model, **options))
    return next(model.parameters()).detach()


def test_every_option_of_torch_is_in_a_table() -> None:
    known = {**COMPUTED, **REFUSED, **IMPLEMENTATION}
    assert {o for name in SUPPORTED for o in options_of(name)} <= known.keys()


@pytest.mark.parametrize(("name", "option", "value"), [*cases(COMPUTED)])
def test_options_that_are_computed(name: str, option: str, value: Any) -> None:
    base = BASE.get(option, {})
    found = after_four_steps(name, **base, **{option: value})
    torch.testing.assert_close(found, eager(name, **base, **{option: value}))
    if (name, option) != ("AdamW", "decoupled_weight_decay") and (option != "decoupled_weight_decay"):
        assert not torch.equal(found, after_four_steps(name, **base))


def test_decoupled_weight_decay_makes_adam_adamw() -> None:
    found = after_four_steps("Adam", weight_decay=0.3, decoupled_weight_decay=True)
    torch.testing.assert_close(found, eager("AdamW", weight_decay=0.3))
    assert not torch.equal(found, after_four_steps("Adam", weight_decay=0.3))


@pytest.mark.parametrize(("name", "option", "value"), [*cases(IMPLEMENTATION)])
def test_options_that_change_nothing(name: str, option: str, value: Any) -> None:
    assert torch.equal(after_four_steps(name, **{option: value}), after_four_steps(name))


def refused(optimizer: optim.Optimizer, model: nn.Module) -> None:
    program = captured().clone()
    with pytest.raises(GraphftError, match=r"^error\[optimizer-option\]"):
        graphft.minimize(program, optimizer, model=model)
    assert str(program) == str(captured())


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_are_refused(option: str) -> None:
    model = line()
    refused(optim.Adam(model.parameters(), **{option: True}), model)


def test_parameters_of_another_model_are_refused() -> None:
    model = line()
    refused(optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))]), model)
    with pytest.raises(GraphftError):
        graphft.minimize(captured().clone(), optim.SGD(model.parameters()))


@pytest.mark.parametrize("name", sorted({*optim.__all__} - {*SUPPORTED} - {*NO_OPTIMIZER}))
def test_other_optimizers_are_refused(name: str) -> None:
    model = line()
    parameters = [model.weight] if name == "Muon" else model.parameters()  # type: ignore[list-item]
    refused(getattr(optim, name)(parameters), model)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_refused_and_a_schedule_takes_its_place(name: str) -> None:
    model = line()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    refused(optimizer, model)
    refused(scheduler, model)
    other = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())  # with the `initial_lr` that most schedulers leave
    other.param_groups[0]["lr"] = graphft.schedule.step(0.1, 3, 0.5)
    graphft.minimize(captured().clone(), other, model=model)


def test_hooks_are_refused() -> None:
    model = line()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for register in (optimizer.register_step_post_hook, torch_hooks.register_optimizer_step_pre_hook):
        handle = register(lambda *_: None)
        try:
            refused(optimizer, model)
        finally:
            handle.remove()
    graphft.minimize(captured().clone(), optimizer, model=model)
