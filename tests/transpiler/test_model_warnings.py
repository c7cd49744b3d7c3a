"""A script changes parts of the model between `minimize` and `transpile`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphft
from graphft.ir import Program

Change = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


def program_of(change: Change) -> Program:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    program = graphft.build(model, lambda model, x: model(x).square().mean(), {"x": (None, 4)})
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    graphft.minimize(program, optimizer, model=model)
    program.kept = change(model, optimizer)  # type: ignore[attr-defined]
    return program


def told(program: Program, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    data = graphft.arrays(x=torch.zeros(8, 4), chunk_size=4)
    graphft.transpile(program, data=data, batch_size=4, **options)
    return "\n".join(
        r.getMessage()
        for r in caplog.records
        if " others than " in r.getMessage() or "changed after minimize" in r.getMessage()
    )


def zeros(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


def test_weights_that_were_loaded_after_minimize_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert "build() copied, with which training begins: 0.weight, 0.bias" in told(program_of(zeros), caplog)


def test_weights_that_the_job_does_not_begin_with_anyway_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    program = program_of(zeros)
    assert told(program, caplog, init_from={n: v + 1 for n, v in graphft.state_dict(program).items()}) == ""


def lower(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.02


def scheduled(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


@pytest.mark.parametrize("change", [lower, scheduled])
def test_an_optimizer_that_was_changed_after_minimize_is_told(change: Change, caplog: pytest.LogCaptureFixture) -> None:
    assert "options, groups or scheduler were changed" in told(program_of(change), caplog)


def test_what_was_loaded_into_the_program_or_copied_with_it_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    program = program_of(lambda *_: None)
    other = graphft.load_weights(program, {n: v + 1 for n, v in graphft.state_dict(program).items()})
    for as_it_was in (program, program.clone(), other.clone(), copy.deepcopy(program)):
        assert told(as_it_was, caplog) == ""


def test_weights_of_every_dtype_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(4, 1)
    model.register_buffer("turned", torch.ones(2, dtype=torch.complex64).conj())
    model.register_buffer("scales", torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))
    program = graphft.build(model, lambda model, x: model(x).square().mean(), {"x": (None, 4)})
    graphft.minimize(program, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert told(program, caplog) == ""
    model.scales = torch.tensor([2.0, float("nan")]).to(torch.float8_e4m3fn)
    assert "with which training begins: scales" in told(program, caplog)
