"""Learning-rate schedules: against torch.optim.lr_scheduler, and as ops of a program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as torch_schedulers

import graphft.ops  # noqa: F401  registers the ops
from graphft import schedule
from graphft.errors import GraphftError, UsageError
from graphft.ir import Kind, Program, Type
from graphft.optim.training import append_schedule, trace_schedule
from graphft.runtime.executor import Executor
from graphft.schedule import Rate


def program_of(rate: Rate) -> Program:
    program = Program("schedule")
    step = program.variable("global_step", Type("int64", ()), Kind.STATE, torch.tensor(0))
    block = program.block("step")
    lr = append_schedule(block, trace_schedule(rate), step, "lr")
    assert lr.type == Type("float64", ())
    block.append_op("increment", step)
    return program


def by_program(rate: Rate, steps: int) -> list[float]:
    program, executor = program_of(rate), Executor()
    return [executor.run(program, fetch="lr")["lr"].item() for _ in range(steps)]


def by_torch(
    make: Callable[[torch.optim.Optimizer], torch_schedulers.LRScheduler], lr: float, steps: int
) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return found


def warm_cosine(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
    return torch_schedulers.ChainedScheduler(
        [
            torch_schedulers.LinearLR(optimizer, start_factor=1 / 8, total_iters=7),
            torch_schedulers.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.0),
        ]
    )


def sequential(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
    parts = [torch_schedulers.StepLR(optimizer, 3), torch_schedulers.ExponentialLR(optimizer, 0.9)]
    return torch_schedulers.SequentialLR(optimizer, parts, milestones=[9])


@pytest.mark.parametrize(
    ("rate", "scheduler"),
    [
        (0.3, lambda o: torch_schedulers.LambdaLR(o, lambda step: 1.0)),
        (schedule.constant(0.3), lambda o: torch_schedulers.LambdaLR(o, lambda step: 1.0)),
        (schedule.linear_warmup(0.3, 10), lambda o: torch_schedulers.LinearLR(o, start_factor=0.1, total_iters=9)),
        (schedule.cosine(0.3, 30, 0.01), lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=30, eta_min=0.01)),
        (schedule.step(0.3, 7, 0.5), lambda o: torch_schedulers.StepLR(o, step_size=7, gamma=0.5)),
        (schedule.exponential(0.3, 0.9), lambda o: torch_schedulers.ExponentialLR(o, gamma=0.9)),
        (schedule.linear_warmup(schedule.cosine(0.3, 30), 8), warm_cosine),
    ],
    ids=["float", "constant", "linear_warmup", "cosine", "step", "exponential", "warmup-cosine"],
)
def test_values_are_those_of_torch(rate: Rate, scheduler: Callable) -> None:
    # Torch computes several of these by recurrence from the step before, so the last digits differ.
    assert by_program(rate, 30) == pytest.approx(by_torch(scheduler, 0.3, 30), rel=1e-12, abs=1e-15)


RECIPES: dict[str, Callable] = {}
"""The functions of docs/optimizers.md, by name."""
exec((Path(__file__).parents[2] / "docs/optimizers.md").read_text().split("```python\n")[2].split("```")[0], RECIPES)


@pytest.mark.parametrize(
    ("rate", "scheduler"),
    [
        (RECIPES["multi_step"](0.3, [4, 11]), lambda o: torch_schedulers.MultiStepLR(o, [4, 11])),
        (RECIPES["polynomial"](0.3, 20, 2.0), lambda o: torch_schedulers.PolynomialLR(o, 20, power=2.0)),
        (RECIPES["one_cycle"](0.3, 30), lambda o: torch_schedulers.OneCycleLR(o, 0.3, 30)),
        (RECIPES["cyclic"](0.1, 0.3, 7), lambda o: torch_schedulers.CyclicLR(o, 0.1, 0.3, 7, cycle_momentum=False)),
        (RECIPES["restarts"](0.3, 8, 0.01), lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 8, eta_min=0.01)),
        (RECIPES["sequential"](schedule.step(0.3, 3), schedule.exponential(0.3, 0.9), 9), sequential),
    ],
    ids=["multi_step", "polynomial", "one_cycle", "cyclic", "restarts", "sequential"],
)
def test_the_recipes_of_the_docs_have_the_curves_of_torch(rate: Rate, scheduler: Callable) -> None:
    assert by_program(rate, 30) == pytest.approx(by_torch(scheduler, 0.3, 30), rel=1e-9, abs=1e-12)


OFFSET = torch.tensor(4.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (
            lambda step: torch.where(step < 3, 0.1 * (step + 1), torch.tensor(0.5, dtype=torch.float64)),
            lambda k: 0.1 * (k + 1) if k < 3 else 0.5,
        ),
        (lambda step: 1 / (step + OFFSET), lambda k: 1 / (k + 4)),
        (lambda step: OFFSET, lambda k: 4.0),
    ],
    ids=["where", "closure", "constant-tensor"],
)
def test_functions_of_the_user(rate: Rate, expected: Callable[[int], float]) -> None:
    assert by_program(rate, 6) == pytest.approx([expected(k) for k in range(6)], rel=1e-6)


class Stateful:
    def __init__(self) -> None:
        self.calls = itertools.count(1)

    def __call__(self, step: Tensor) -> Tensor:
        return step * next(self.calls)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (lambda step: 0.1 if step < 10 else 0.01, r"test_schedule.py:\d+ in <lambda>.*\n.*torch\.where"),
        (lambda step: 0.1 * math.cos(step), r"torch\.cos"),
        (lambda step: min(step, 10) * 0.1, r"torch\.clamp"),
        (lambda step: step.numpy() * 0.1, "torch functions"),
        (lambda step: torch.rand(()) * step, "random"),
        (Stateful(), "Stateful does not depend on the step alone"),
        (lambda step: step * torch.ones(3), r"shape \(3,\)"),
    ],
    ids=["if", "math", "min", "numpy", "random", "stateful", "shape"],
)
def test_what_cannot_be_traced(rate: Rate, message: str) -> None:
    with pytest.raises(GraphftError, match=message) as error:
        trace_schedule(rate)
    assert error.value.rule == "schedule"


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedule.cosine(0.1, 0),
        lambda: schedule.step(0.1, -1),
        lambda: schedule.linear_warmup(10, schedule.cosine(0.1, 100)),  # in another order
        lambda: schedule.cosine(0.1, "100"),
    ],
)
def test_lengths_are_positive_numbers(make: Callable) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert error.value.rule == "schedule"
    assert "linear_warmup(schedule, steps)" in error.value.help
