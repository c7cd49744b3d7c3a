"""Values to begin with that are not finite."""

from __future__ import annotations

import logging

from torch import Tensor

from graphft.ir import Kind, Program, Variable

log = logging.getLogger("graphft")


def tell_nonfinite(program: Program, when: str) -> None:
    """A warning if a parameter or a buffer is not finite: a damaged file of weights, say."""
    wild = [
        f"{'buffer' if v.kind is Kind.BUFFER else 'parameter'} {v.name}"
        for v in program.of_kind(Kind.PARAM, Kind.FROZEN, Kind.BUFFER)
        if v.name in program.values and _is_wild(v, program.values[v.name])
    ]
    if wild:
        log.warning(
            "%s of program '%s' is not finite %s%s: look at what it was loaded from",
            wild[0],
            program.name,
            when,
            f", and so are {len(wild) - 1} others" * (len(wild) > 1),
        )


def _is_wild(variable: Variable, value: Tensor) -> bool:
    """A mask has -inf with good reason: in a buffer that is none."""
    if not value.is_floating_point():
        return False
    if value.element_size() == 1:  # float8: few ops take it
        value = value.float()
    if variable.kind is Kind.BUFFER:
        value = value.nan_to_num(nan=float("nan"), neginf=0.0, posinf=float("inf"))
    return not bool(value.isfinite().all())
