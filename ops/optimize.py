"""Optimizers: each op evolves one parameter (or one slice of it) and its state in place, by torch.optim's kernels.

Operands are `(param, grad, lr, *state)`. `lr` is a 0-dim float64 tensor. State has the shape of the parameter, but
for `step`, a 0-dim float32 count of this parameter's updates.

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
from graphft.ir.registry import op
from graphft.ops.context import Context
from graphft.optim.optimizers import OPTIMIZERS

_FUSED = (torch.float32, torch.float64)
"""Dtypes for torch's fused kernels. Its fused SGD on the CPU leaves float16 and bfloat16 parameters unchanged but for
the last few elements, and reads their momentum wrongly (pytorch issue 191763): these take the plain kernels."""


def _check(operator: Operator, block: Block) -> None:
    """Gradient and state fit the parameter; the learning rate is a floating-point scalar."""
    types = [block.program.variables[ref.name].type for ref in operator.args]
    param, grad, lr = types[:3]
    if grad != param:
        raise ProgramError(
            f"{operator.type}: parameter {operator.operand('param')} is {param}, "
            f"but its gradient {operator.operand('grad')} is {grad}",
            block=block,
            rule="optimizer-operand",
            help="give the gradient of this parameter, with its shape and dtype",
        )
    if lr.shape != () or not lr.dtype.startswith("float"):
        raise ProgramError(
            f"{operator.type}: the learning rate {operator.operand('lr')} must be float64[], got {lr}",
            block=block,
            rule="optimizer-operand",
            help="reduce it to a 0-dim float64 tensor",
        )
    expected = OPTIMIZERS[operator.type](**operator.attrs).state()
    if len(operator.args) != 3 + len(expected):
        raise ProgramError(
            f"{operator.type} takes state ({', '.join(expected)}), got {operator.args[3:]}",
            block=block,
            rule="optimizer-operand",
            help="the options decide which state there is",
        )
    for ref, state in zip(operator.args[3:], types[3:], strict=True):
        if state.shape not in (param.shape, ()):
            raise ProgramError(
                f"{operator.type}: state {ref} is {state}, expected the parameter's shape {param}, or a scalar",
                block=block,
                rule="optimizer-operand",
                help="declare it like its parameter",
            )


def _like(grad: Tensor, param: Tensor) -> Tensor:
    """`grad` in the memory layout of `param`; itself where it has it already."""
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)


@op("sgd", check=_check, writes=("param", "state"))
def sgd(
    ctx: Context,
    param: Tensor,
    grad: Tensor,
    lr: Tensor,
    *state: Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Stochastic gradient descent, as torch.optim.SGD. State with momentum: `momentum_buffer`, `step`; else none.

    The first step fills the momentum buffer with the gradient, undampened, as torch does.
    """
    buffers: list[Tensor | None] = [None]
    if momentum != 0:
        buffers = [state[0] if state[1].item() > 0 else None]
        state[1].add_(1)
    torch_sgd.sgd(
        [param],
        [_like(grad, param)],
        buffers,
        foreach=False,
        fused=param.dtype in _FUSED,
        lr=lr.item(),
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
    )
    if momentum != 0 and (made := buffers[0]) is not None and made is not state[0]:
        state[0].copy_(made)


def _adam(
    fused: Callable[..., None],
    param: Tensor,
    grad: Tensor,
    lr: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    max_exp_avg_sq: tuple[Tensor, ...],
    **options: Any,
) -> None:
    """Applies Adam by torch's `fused` kernel, called directly: torch.optim's wrapper costs twice as much as the kernel
    of a small parameter."""
    operands = [param], [_like(grad, param)], [exp_avg], [exp_avg_sq], list(max_exp_avg_sq), [step]
    if param.dtype in _FUSED:
        step.add_(1)
        fused(*operands, lr=lr.item(), **options)
    else:
        decoupled = fused is torch._fused_adamw_
        torch_adam.adam(*operands, foreach=False, decoupled_weight_decay=decoupled, lr=lr.item(), **options)


@op("adam", check=_check, writes=("param", "exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq"))
def adam(
    ctx: Context,
    param: Tensor,
    grad: Tensor,
    lr: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *max_exp_avg_sq: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> None:
    """Adam, as torch.optim.Adam (weight decay is L2: added to the gradient). `max_exp_avg_sq` only with `amsgrad`."""
    _adam(
        torch._fused_adam_,
        param,
        grad,
        lr,
        exp_avg,
        exp_avg_sq,
        step,
        max_exp_avg_sq,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        maximize=maximize,
    )


@op("adamw", check=_check, writes=("param", "exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq"))
def adamw(
    ctx: Context,
    param: Tensor,
    grad: Tensor,
    lr: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *max_exp_avg_sq: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> None:
    """Adam with decoupled weight decay, as torch.optim.AdamW. `max_exp_avg_sq` only with `amsgrad`."""
    _adam(
        torch._fused_adamw_,
        param,
        grad,
        lr,
        exp_avg,
        exp_avg_sq,
        step,
        max_exp_avg_sq,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        maximize=maximize,
    )


@op("adagrad", check=_check, writes=("param", "square_sum", "step"))
def adagrad(
    ctx: Context,
    param: Tensor,
    grad: Tensor,
    lr: Tensor,
    square_sum: Tensor,
    step: Tensor,
    *,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
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
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )


@op("rmsprop", check=_check, writes=("param", "square_avg", "step", "state"))
def rmsprop(
    ctx: Context,
    param: Tensor,
    grad: Tensor,
    lr: Tensor,
    square_avg: Tensor,
    step: Tensor,
    *state: Tensor,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> None:
    """RMSprop, as torch.optim.RMSprop, which has no fused kernel.

    `state` is `momentum_buffer` (with momentum), then `grad_avg` (if centered).
    """
    momentum_buffers, grad_avgs = (state[:1], state[1:]) if momentum > 0 else ((), state)
    torch_rmsprop.rmsprop(
        [param],
        [_like(grad, param)],
        [square_avg],
        list(grad_avgs),
        list(momentum_buffers),
        [step],
        foreach=False,
        lr=lr.item(),
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        momentum=momentum,
        centered=centered,
        maximize=maximize,
    )


@op("increment", writes=("counter",))
def increment(ctx: Context, counter: Tensor) -> None:
    """counter <- counter + 1, in place."""
    counter.add_(1)
