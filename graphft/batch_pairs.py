"""Finds a difference or comparison of each sample with each other one that is hardly meant: [batch, 1] with [batch].

`model(x) - y` of a model with one output and targets of shape [batch] is [batch, batch]; its mean is a number that
falls as the mean of the targets is learned, and no more.
"""

from __future__ import annotations

import logging

from graphft.ir import Kind, Operator, Program, refs
from graphft.types import Dim

log = logging.getLogger(__name__)

_COMPARED = frozenset({"sub", "sub_", "rsub", "eq", "ne", "minimum", "maximum"})


def warn_of_pairs(program: Program) -> None:
    """A warning for the first op of block `step` that broadcasts a column with one entry per sample against a vector
    with one entry per sample. Where pairs are meant, [batch, 1] with [1, batch] says so, and is not told."""
    batch = {v.type.shape[0] for v in program.of_kind(Kind.INPUT) if v.type.shape}
    for op in program.blocks["step"].ops:
        if op.type.split(".")[1:2] and op.type.split(".")[1] in _COMPARED and _pairs(program, op, batch):
            column, vector = (str(program.variables[ref.name].type) for ref in refs(op.args))
            log.warning(
                "%s: %s of %s and %s is %s: each sample with each other one of its batch; expected each with its own: "
                "write squeeze(-1) for the one, or unsqueeze(-1) for the other (where pairs are meant: unsqueeze(0))",
                op.loc or "loss_fn",
                op.type,
                column,
                vector,
                program.variables[op.writes[0]].type,
            )
            return


def _pairs(program: Program, op: Operator, batch: set[Dim]) -> bool:
    shapes = sorted((program.variables[ref.name].type.shape or () for ref in refs(op.args)), key=len)
    match shapes:
        case [(size,), (*_, rows, 1)]:
            return size == rows and size in batch and isinstance(size, str)
    return False
