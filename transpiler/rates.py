"""The learning rate of a step, known before the job runs."""

from __future__ import annotations

import logging
import random
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import torch

from graphft.ir import Arg, Program, Ref, registry
from graphft.ir.literals import resolve
from graphft.optim.training import GLOBAL_STEP
from graphft.transpiler.optimization import find_optimization

log = logging.getLogger("graphft")

PIECES = 64
"""The rate is looked at in so many steps, and exactly where it becomes 0."""


def rates_at(program: Program, step: int) -> dict[str, float]:
    """The learning rates of `step`, by the names of their variables."""
    found = find_optimization(program.blocks["step"])
    values: dict[str, Any] = {**program.values, GLOBAL_STEP: torch.tensor(step)}
    with torch.no_grad():
        for op in found.schedule:
            definition = registry.require(op)
            if not definition.extra.get("context_free"):  # it counts the step
                continue
            result = definition.kernel(
                *(_value(a, values) for a in op.args), **{k: _value(a, values) for k, a in op.attrs.items()}
            )
            results = result if isinstance(result, tuple) else (result,)
            values.update({name: r for name, r in zip(op.outputs, results, strict=True) if name is not None})
    return {name: float(values[name]) for name in sorted({op.operand("lr").name for op in found.updates.values()})}


def _value(arg: Arg, values: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, tuple):
        return tuple(_value(a, values) for a in arg)
    return resolve(arg, "cpu")


def tell_zero_rate(program: Program, steps: int) -> None:
    """A warning if a learning rate is 0 in the last steps of the job: in more than one, and one in a hundred."""
    looked = sorted({steps * i // PIECES for i in range(PIECES)} | {steps - 1})
    for name, last in rates_at(program, steps - 1).items():
        if last != 0:
            continue
        before = [k for k in looked if rates_at(program, k)[name] != 0]
        low = before[-1] + 1 if before else 0
        high = next(k for k in looked if k >= low)
        first = low + bisect_left(range(low, high), True, key=lambda k: rates_at(program, k)[name] == 0)
        rest = random.Random(0).sample(range(first, steps), min(PIECES, steps - first))
        if any(rates_at(program, k)[name] != 0 for k in rest):
            continue  # it comes and goes
        if steps - first > max(1, steps // 100):
            log.warning(
                "the learning rate %%%s is 0 from step %d on, and the job has %d steps: the last %d do not change its "
                "parameters (is its schedule made for fewer steps?)",
                name,
                first,
                steps,
                steps - first,
            )
