"""The learning rates that a role's optimizers use: the values themselves, not what a schedule is to give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphft.ir import Program
from graphft.optim.optimizers import OPTIMIZER_OPS


def rate_names(program: Program) -> tuple[str, ...]:
    """The variables: one, or one for each parameter group that has another one. None in a role without optimizers."""
    ops = [op for block in program.blocks.values() for op in block.ops if op.type in OPTIMIZER_OPS]
    return tuple(sorted({op.operand("lr").name for op in ops}))


def rates_in(scope: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Their values, as the last step left them; without those that no step has computed so far."""
    return {name: float(scope[name]) for name in names if name in scope}
