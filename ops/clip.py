"""Gradient clipping, by value and by global norm.

The global norm is not elementwise, so it is reduced in an order that does not depend on who holds which slice:
each parameter's flat gradient is cut into units of `unit` elements, each unit's squares are summed in float64 by
a fixed tree, and the units' sums, in canonical order (parameters as declared, units ascending), again by that
tree. Shards whose slices end at multiples of `unit` compute their own units' sums, exchange these short vectors,
put them in canonical order, and all get the same bits, whatever their number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator, Type
from graphft.ir.registry import op
from graphft.ops.context import Context

UNIT = 8192
"""Elements per partial sum; slices of parameters end at multiples of it."""

_UNITS_AT_ONCE = 64
"""Bounds the float64 copies to 4 MB, which stays in a cache (measured: twice as fast as converting a whole tensor)."""


def _partial_sums(operator: Operator, block: Block) -> list[Type]:
    unit, units = operator.attrs.get("unit", UNIT), 0
    if unit < 1:
        raise ProgramError(
            f"squared_norms: unit must be positive, got {unit}",
            block=block,
            rule="attribute",
            help=f"leave it out: {UNIT} elements",
        )
    for ref in operator.args:
        numel = block.program.variables[ref.name].type.numel
        if numel is None:
            raise ProgramError(
                f"squared_norms needs gradients of known shape, {ref} is {block.program.variables[ref.name].type}",
                block=block,
                rule="symbolic-shape",
                help="clip the gradients of parameters, whose shapes are fixed",
            )
        units += -(-numel // unit)
    return [Type("float64", (units,))]


@op("squared_norms", infer=_partial_sums)
def squared_norms(ctx: Context, *grads: Tensor, unit: int = UNIT) -> Tensor:
    """Sums of squares, float64, one per unit of `unit` consecutive elements of each flattened gradient, in order.

    The last unit of a gradient may be shorter. The bits of a unit's sum depend on its elements only.
    """
    sums = []
    for grad in grads:
        flat = grad.reshape(-1)
        whole = flat.numel() // unit * unit
        for piece in (*flat[:whole].split(unit * _UNITS_AT_ONCE), flat[whole:]):
            if piece.numel():
                sums.append(_tree_sum(piece.double().square().view(-1, min(unit, piece.numel()))))
    return torch.cat(sums)


@op("clip_by_global_norm", writes=("grad",))
def clip_by_global_norm(ctx: Context, grad: Tensor, sqnorm: Tensor, *, max_norm: float) -> None:
    """grad <- grad * min(1, max_norm / (norm + 1e-6)), in place, as torch.nn.utils.clip_grad_norm_.

    `sqnorm` holds the partial sums of squares of *all* gradients, in canonical order. A norm that is not a number
    makes the gradient so too, as in torch.
    """
    norm = math.sqrt(_tree_sum(sqnorm.clone().view(1, -1)).item())
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1.0:  # so written, a NaN scales
        grad.mul_(scale)


@op("clip_by_value", writes=("grad",))
def clip_by_value(ctx: Context, grad: Tensor, *, limit: float) -> None:
    """grad <- min(max(grad, -limit), limit), in place, as torch.nn.utils.clip_grad_value_."""
    grad.clamp_(-limit, limit)


def _tree_sum(rows: Tensor) -> Tensor:
    """Sums each row of a 2-d tensor, which it overwrites, by halving.

    Only elementwise additions: each rounds correctly, so the bits depend on no kernel, vector width or device.
    """
    n = rows.shape[1]
    while n > 1:
        half = 1 << ((n - 1).bit_length() - 1)
        rows[:, : n - half] += rows[:, half:n]
        n = half
    return rows[:, 0].clone()  # not a view, which would keep all of `rows`
