"""Learning rates as functions of the step.

A schedule is a function from the number of completed steps (a 0-dim float64 tensor, 0 at the first step) to the
learning rate. It is traced once into `aten.*` ops, which compute `%lr` from `%global_step` in the program, so it
uses torch functions, not Python's control flow or `math`, on the step:

    graphft.minimize(program, graphft.SGD(lr=schedule.linear_warmup(schedule.cosine(0.1, 10_000), 500)))
    graphft.minimize(program, graphft.SGD(lr=lambda step: 0.1 * torch.rsqrt(torch.clamp(step, min=1.0))))
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError

Schedule = Callable[[Tensor], Tensor]
Rate = float | Schedule
"""A constant learning rate, or a schedule."""


def constant(lr: float) -> Schedule:
    """Returns `lr` at every step."""
    return lambda step: torch.full((), lr, dtype=torch.float64)


def linear_warmup(schedule: Rate, steps: int) -> Schedule:
    """Returns `schedule`, times a factor that rises from 1/steps at step 0 to 1 at step steps - 1, and stays there.

    The schedule's own steps count from 0 as well, warm-up included.
    """
    _positive("linear_warmup", steps=steps)
    return lambda step: at(schedule, step) * torch.clamp((step + 1) / steps, max=1.0)


def cosine(lr: float, total_steps: int, min_lr: float = 0.0) -> Schedule:
    """Returns from `lr` at step 0 along half a cosine to `min_lr` at step `total_steps`, and `min_lr` from then on."""
    _positive("cosine", total_steps=total_steps)
    return lambda step: (
        min_lr + (lr - min_lr) * ((1 + torch.cos(torch.clamp(step, max=total_steps) * (math.pi / total_steps))) / 2)
    )


def step(lr: float, step_size: int, gamma: float = 0.1) -> Schedule:
    """Returns `lr`, times `gamma` after every `step_size` steps."""
    _positive("step", step_size=step_size)
    return lambda step: lr * torch.pow(gamma, torch.floor(step / step_size))


def exponential(lr: float, gamma: float) -> Schedule:
    """Returns `lr`, times `gamma` after every step."""
    return lambda step: lr * torch.pow(gamma, step)


def at(schedule: Rate, step: Tensor) -> Tensor:
    """Returns the learning rate at `step`, as a 0-dim float64 tensor. Raises GraphftError for any other shape."""
    value = schedule(step) if callable(schedule) else schedule
    lr = value.to(torch.float64) if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64)
    if lr.shape != ():
        text = f"{describe(schedule)} gives a learning rate of shape {tuple(lr.shape)}, expected a scalar ()"
        raise bad_schedule(text, "give one number per step; parameter groups have one schedule each")
    return lr


def _positive(name: str, **values: int) -> None:
    for key, value in values.items():
        if not isinstance(value, Real) or value <= 0:
            text = f"schedule {name}: {key} is {value!r}, expected a positive number of steps"
            help = "write linear_warmup(schedule, steps), cosine(lr, total_steps), or step(lr, step_size, gamma)"
            raise UsageError(text, rule="schedule", help=help)


def bad_schedule(text: str, help: str) -> GraphftError:
    return GraphftError(text, rule="schedule", help=help)


def describe(schedule: Rate) -> str:
    code = getattr(schedule, "__code__", None)
    where = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
    return f"the learning-rate schedule {getattr(schedule, '__qualname__', type(schedule).__name__)}{where}"


__all__ = ["Rate", "Schedule", "at", "constant", "cosine", "exponential", "linear_warmup", "step"]
