"""These ops change gradients before they are applied: clipping by value and global norm, delay compensation.

The global norm is not elementwise, so it is reduced in an order that does not depend on the number of shards:
each parameter's flat gradient is cut into units of `unit` elements, each unit's squares are summed in float64 by
a fixed tree, and the units' sums, in canonical order (parameters as declared, units ascending), again by that
tree. Shards whose slices end at multiples of `unit` compute their own units' sums, and exchange these short vectors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator, Type
from graphft.ir.registry import op
from graphft.ops.context import Context
from graphft.ops.data import one_type

UNIT = 8192
"""Elements per partial sum; slices of parameters end at multiples of it."""

_UNITS_AT_ONCE = 64
"""Bounds the float64 copies to 4 MB, which stays in a cache (measured: twice as fast as converting a whole tensor)."""


def _partial_sums(operator: Operator, block: Block) -> list[Type]:
    unit, units = operator.attrs.get("unit", UNIT), 0
    if unit < 1:
        raise ProgramError(f"squared_norms: unit must be positive, got {unit}", block=block, rule="attribute")
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
                squares = (torch.view_as_real(piece) if piece.is_complex() else piece).double().square()
                squares = squares.sum(-1) if piece.is_complex() else squares
                sums.append(_tree_sum(squares.view(-1, min(unit, piece.numel()))))
    return torch.cat(sums)


@op("clip_by_global_norm", writes=("grad",))
def clip_by_global_norm(ctx: Context, grad: Tensor, sqnorm: Tensor, *, max_norm: float) -> None:
    """grad <- grad * min(1, max_norm / (norm + 1e-6)), in place, as torch.nn.utils.clip_grad_norm_.

    `sqnorm` holds the partial sums of squares of *all* gradients, in canonical order.
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


def _check_delay(operator: Operator, block: Block) -> None:
    one_type(operator, block)
    wanted = 4 if operator.attrs.get("decay") else 3
    if len(operator.args) != wanted:
        what = f"dc_asgd takes {wanted} operands here, got {len(operator.args)}"
        raise ProgramError(what, block=block, rule="operands", help="with decay, mean_square is the fourth; else, none")


@op("dc_asgd", check=_check_delay, writes=("grad", "mean_square"))
def dc_asgd(
    ctx: Context,
    grad: Tensor,
    param: Tensor,
    backup: Tensor,
    *mean_square: Tensor,
    strength: float = 0.04,
    decay: float = 0.0,
) -> None:
    """grad <- grad + lambda * grad * grad * (param - backup), in place, elementwise (Zheng et al., "Asynchronous
    Stochastic Gradient Descent with Delay Compensation", ICML 2017).

    `backup` is the parameter that the gradient was computed from; lambda is `strength`. With `decay`, lambda is
    `strength` / sqrt(mean_square + 1e-7), and mean_square becomes decay * mean_square + (1 - decay) * grad * grad.
    """
    # Each kernel rounds once (no addcmul, no add_(alpha=)), so that the bits do not depend on how a parameter is cut.
    change = (param - backup).mul_(grad).mul_(grad).mul_(strength)
    for mean in mean_square:
        mean.mul_(decay).add_(grad.square().mul_(1 - decay))
        change.div_(mean.add(1e-7).sqrt_())
    grad.add_(change)


@op("update_scale", writes=("scale", "growth_tracker"))
def update_scale(
    ctx: Context,
    scale: Tensor,
    growth_tracker: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    found_inf: bool = False,
) -> None:
    """Evolves the loss scale in place, as torch.amp.GradScaler.update. `growth_tracker`, an int32, counts the steps
    since it was changed last. `found_inf`: a gradient of the step is not finite."""
    found = torch.full_like(scale, found_inf)
    torch._amp_update_scale_(scale, growth_tracker, found, growth_factor, backoff_factor, growth_interval)
