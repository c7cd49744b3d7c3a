"""Optimizers: each op evolves one parameter (or one slice of it) and its state in place, by torch.optim's kernels.

Operands are `(param, grad, lr, *state)`. `lr` is a 0-dim float64 tensor. State has the shape of the parameter, but
for `step`, a 0-dim float32 count of this parameter's updates. Attributes are the options of the optimizer's class.

Every kernel is elementwise: run on slices that end at multiples of 64 elements it gives the bits that it gives on
the whole parameter (with one intra-op thread), so the number of shards does not show in the result. Parameters and
state are contiguous, as all values of a program are, and a gradient is laid out as its parameter: torch's fused CPU
kernels walk raw memory, and silently mix elements up when the strides differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import adagrad as torch_adagrad
from torch.optim import adam as torch_adam
from torch.optim import rmsprop as torch_rmsprop
from torch.optim import sgd as torch_sgd

from graphft.errors import ProgramError
from graphft.ir import Block, Operator
from graphft.ir.registry import Kernel, attributes_of, op
from graphft.ops.context import Context
from graphft.optim.optimizers import NO_ATTRIBUTE, OPTIMIZERS

_FUSED = (torch.float32, torch.float64)
"""Dtypes for torch's fused kernels. Its fused SGD on the CPU leaves float16 and bfloat16 parameters unchanged but for
the last few elements, and reads their momentum wrongly (pytorch issue 191763): these take the plain kernels."""
_ATTRIBUTES = {name: attributes_of(spec, NO_ATTRIBUTE) for name, spec in OPTIMIZERS.items()}
_DEFAULTS = {name: {a.name: a.default for a in attrs} for name, attrs in _ATTRIBUTES.items()}


def _check(operator: Operator, block: Block) -> None:
    """Gradient and state fit the parameter; the learning rate is a floating-point scalar."""
    types = [block.program.variables[ref.name].type for ref in operator.args]
    param, grad, lr = types[:3]
    expected = OPTIMIZERS[operator.type](**operator.attrs).state()
    if grad != param:
        problem = f"parameter {operator.operand('param')} is {param}, but its gradient is {grad}"
    elif lr.shape != () or not lr.dtype.startswith("float"):
        problem = f"the learning rate {operator.operand('lr')} must be float64[], got {lr}"
    elif len(operator.args) != 3 + len(expected):
        problem = f"with these options, state is ({', '.join(expected)}), got {operator.args[3:]}"
    elif wrong := [state for state in types[3:] if state.shape not in (param.shape, ())]:
        problem = f"state is {wrong[0]}, expected the parameter's shape {param}, or a scalar"
    else:
        return
    raise ProgramError(
        f"{operator.type}: {problem}",
        block=block,
        rule="optimizer-operand",
        help="gradient and state are declared like their parameter, the learning rate as float64[]",
    )


def _optimizer(name: str, *state: str) -> Callable[[Kernel], Kernel]:
    return op(name, check=_check, writes=("param", *state), attrs=_ATTRIBUTES[name])


def _like(grad: Tensor, param: Tensor) -> Tensor:
    """`grad` in the memory layout of `param`; itself where it has it already."""
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)


@_optimizer("sgd", "state")
def sgd(ctx: Context, param: Tensor, grad: Tensor, lr: Tensor, *state: Tensor, **options: Any) -> None:
    """Stochastic gradient descent, as torch.optim.SGD. State with momentum: `momentum_buffer`, `step`; else none.

    The first step fills the momentum buffer with the gradient, undampened, as torch does.
    """
    buffers: list[Tensor | None] = [None]
    if state:
        buffers = [state[0] if state[1].item() > 0 else None]
        state[1].add_(1)
    torch_sgd.sgd(
        [param],
        [_like(grad, param)],
        buffers,
        foreach=False,
        fused=param.dtype in _FUSED,
        lr=lr.item(),
        **(_DEFAULTS["sgd"] | options),
    )
    if state and (made := buffers[0]) is not None and made is not state[0]:
        state[0].copy_(made)


def _register_adam(name: str, doc: str) -> None:
    def adam(
        ctx: Context,
        param: Tensor,
        grad: Tensor,
        lr: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: Tensor,
        *max_exp_avg_sq: Tensor,
        **options: Any,
    ) -> None:
        # torch's fused kernel itself: torch.optim's wrapper costs twice as much as the kernel of a small parameter
        given = {"lr": lr.item(), **_DEFAULTS[name], **options}
        given["beta1"], given["beta2"] = given.pop("betas")
        operands = [param], [_like(grad, param)], [exp_avg], [exp_avg_sq], list(max_exp_avg_sq), [step]
        if param.dtype in _FUSED:
            step.add_(1)
            fused(*operands, **given)
        else:
            torch_adam.adam(*operands, foreach=False, decoupled_weight_decay=name == "adamw", **given)

    fused = torch._fused_adam_ if name == "adam" else torch._fused_adamw_
    adam.__doc__ = doc
    _optimizer(name, "exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq")(adam)


_register_adam(
    "adam",
    "Adam, as torch.optim.Adam (weight decay is L2: added to the gradient). `max_exp_avg_sq` only with `amsgrad`.",
)
_register_adam("adamw", "Adam with decoupled weight decay, as torch.optim.AdamW. `max_exp_avg_sq` only with `amsgrad`.")


@_optimizer("adagrad", "square_sum", "step")
def adagrad(
    ctx: Context, param: Tensor, grad: Tensor, lr: Tensor, square_sum: Tensor, step: Tensor, **options: Any
) -> None:
    """Adagrad, as torch.optim.Adagrad. `square_sum` starts at the optimizer's `initial_accumulator_value`."""
    torch_adagrad.adagrad(
        [param],
        [_like(grad, param)],
        [square_sum],
        [step],
        foreach=False,
        fused=param.dtype in _FUSED,
        lr=lr.item(),
        **(_DEFAULTS["adagrad"] | options),
    )


@_optimizer("rmsprop", "square_avg", "step", "state")
def rmsprop(
    ctx: Context,
    param: Tensor,
    grad: Tensor,
    lr: Tensor,
    square_avg: Tensor,
    step: Tensor,
    *state: Tensor,
    **options: Any,
) -> None:
    """RMSprop, as torch.optim.RMSprop, which has no fused kernel.

    `state` is `momentum_buffer` (with momentum), then `grad_avg` (if centered).
    """
    given = _DEFAULTS["rmsprop"] | options
    momentum_buffers, grad_avgs = (state[:1], state[1:]) if given["momentum"] > 0 else ((), state)
    torch_rmsprop.rmsprop(
        [param],
        [_like(grad, param)],
        [square_avg],
        list(grad_avgs),
        list(momentum_buffers),
        [step],
        foreach=False,
        lr=lr.item(),
        **given,
    )


@op("increment", writes=("counter",))
def increment(ctx: Context, counter: Tensor) -> None:
    """counter <- counter + 1, in place."""
    counter.add_(1)
