"""Delay compensation: corrects a gradient for what was applied to the parameter since it was computed."""

from __future__ import annotations

from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator
from graphft.ir.registry import op
from graphft.ops.context import Context

_EPS = 1e-7
"""Of the adaptive variant, as in the paper."""


def _check(operator: Operator, block: Block) -> None:
    """Everything has the gradient's type; the mean square is there if, and only if, it is used."""
    gradient = operator.operand("grad")
    types = {ref: block.program.variables[ref.name].type for ref in operator.args}
    for ref, type in types.items():
        if type != types[gradient]:
            raise ProgramError(
                f"dc_asgd: {ref} is {type}, but the gradient {gradient} is {types[gradient]}",
                block=block,
                rule="optimizer-operand",
                help="give the parameter of this gradient, and its backup",
            )
    decay = operator.attrs.get("decay", 0.0)
    if not 0 <= decay < 1 or len(operator.args) != (4 if decay else 3):
        raise ProgramError(
            f"dc_asgd with decay {decay} takes (grad, param, backup{', mean_square' * (decay != 0)}), "
            f"got {operator.args}",
            block=block,
            rule="optimizer-operand",
            help="decay is at least 0 and below 1; the mean square is given if it is not 0",
        )


@op("dc_asgd", check=_check, writes=("grad", "mean_square"))
def dc_asgd(
    ctx: Context,
    grad: Tensor,
    param: Tensor,
    backup: Tensor,
    *mean_square: Tensor,
    strength: float = 0.04,
    decay: float = 0.0,
) -> None:
    """grad <- grad + lambda * grad * grad * (param - backup), in place, elementwise.

    `backup` is the parameter that the gradient was computed from; lambda is `strength`. Other batches have moved the
    parameter to `param` since: grad * grad * (param - backup) estimates how much that changes the gradient (Zheng et
    al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017).

    With `decay`, lambda is `strength` / sqrt(mean_square + 1e-7), element by element, and mean_square, which starts at
    0, becomes decay * mean_square + (1 - decay) * grad * grad first (the paper's DC-ASGD-a).
    """
    # Each kernel rounds once (no addcmul, no add_(alpha=)), so that the bits do not depend on how a parameter is cut.
    change = (param - backup).mul_(grad).mul_(grad).mul_(strength)
    for mean in mean_square:
        mean.mul_(decay).add_(grad.square().mul_(1 - decay))
        change.div_(mean.add(_EPS).sqrt_())
    grad.add_(change)
