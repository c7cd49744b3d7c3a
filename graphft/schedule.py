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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphft.capture.locations import error_line
from graphft.errors import GraphftError, UsageError
from graphft.ir import Block, Type, Variable

if TYPE_CHECKING:
    from graphft.capture.tracing import Traced

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
        text = f"{_name(schedule)} gives a learning rate of shape {tuple(lr.shape)}, expected a scalar ()"
        raise _bad(text, "give one number per step; parameter groups have one schedule each")
    return lr


def trace(schedule: Rate) -> Traced:
    """Returns `schedule` as a recorded function of the int64 step. Raises GraphftError where it cannot be recorded."""

    from graphft.capture import tracing  # tracing takes a second to import, and only this needs it
    from graphft.ir.symbolic import Symbols

    def lr(step: Tensor) -> list[Tensor]:
        return [at(schedule, step.to(torch.float64))]

    symbols = Symbols()
    try:
        traced = tracing.trace(lr, [symbols.tensor(Type("int64", ()))], symbols)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        help = (
            "use torch functions on the step, not Python's: torch.where(step < 10, a, b) for if, torch.cos "
            "for math.cos, torch.clamp for min and max"
        )
        raise _bad(f"{_name(schedule)} cannot be traced ({error_line(error)}): {reason}", help) from error
    for node in traced.module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            help = "compute the learning rate from the step alone, so that every shard gets the same"
            raise _bad(f"{_name(schedule)} draws random numbers ({node.target})", help)
    for k in (0, 1, 1000):
        (found,), (expected,) = traced.module(torch.tensor(k)), lr(torch.tensor(k))
        if not torch.equal(found, expected):
            text = (
                f"{_name(schedule)} does not depend on the step alone: at step {k} it gives {found.item()}, and when "
            )
            help = "keep no state between calls, and use only torch functions on the step"
            raise _bad(f"{text}it is called again {expected.item()}", help)
    (result,) = traced.results
    if result is None or result.op != "call_function":  # a tensor from outside, which has no op to name `%lr` after
        return trace(at(schedule, torch.zeros((), dtype=torch.float64)).item())
    return traced


def append(block: Block, traced: Traced, step: Variable, name: str) -> Variable:
    """Appends a recorded schedule's ops to `block`; they compute variable `name`, which is returned, from `step`."""
    from graphft.capture import tracing

    (result,) = traced.results
    assert result is not None
    tracing.emit(traced, block, [step.name], {result: name})
    return block.program.variables[name]


def _positive(name: str, **values: int) -> None:
    for key, value in values.items():
        if not isinstance(value, Real) or value <= 0:
            text = f"schedule {name}: {key} is {value!r}, expected a positive number of steps"
            help = "write linear_warmup(schedule, steps), cosine(lr, total_steps), or step(lr, step_size, gamma)"
            raise UsageError(text, rule="schedule", help=help)


def _bad(text: str, help: str) -> GraphftError:
    return GraphftError(text, rule="schedule", help=help)


def _name(schedule: Rate) -> str:
    code = getattr(schedule, "__code__", None)
    where = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
    return f"the learning-rate schedule {getattr(schedule, '__qualname__', type(schedule).__name__)}{where}"


__all__ = ["Rate", "Schedule", "append", "at", "constant", "cosine", "exponential", "linear_warmup", "step", "trace"]
