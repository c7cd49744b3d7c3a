"""Shapes of results that this torch cannot tell of tensors without data, though it computes them on tensors with data.

A trace and the inference of types run torch's operators on tensors without data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import _is_op_registered_to_fake_rule, register_op_impl
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size


def _ctc_loss(
    mode: FakeTensorMode, func: Any, log_probs: Tensor, targets: Tensor, *lengths_and_options: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """(loss of each sample, what the backward pass needs): the latter is as long as the longest target makes it."""
    if mode.shape_env is None:
        raise DynamicOutputShapeException(func)
    states = mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(states)
    time, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, time, states))


def _ctc_loss_backward(
    mode: FakeTensorMode, func: Any, grad: Tensor, log_probs: Tensor, *others: Any, **options: Any
) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _like_input(mode: FakeTensorMode, func: Any, grad: Tensor, input: Tensor, *others: Any, **options: Any) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _grouped_mm(
    mode: FakeTensorMode,
    func: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Rows of `a` in groups that end at `offs`, each times a matrix of `b`.

    Torch's own kernel for tensors without data takes bfloat16 alone, as CUDA does; the CPU takes float32, too. And it
    looks at strides, which a program's types do not have: inference takes a transposed operand for a contiguous one.
    """
    if a.device.type != "cpu":
        return NotImplemented
    if a.dim() == 2:
        size = [a.size(0), b.size(-1)] if b.dim() == 3 or offs is None else [offs.size(0), a.size(0), b.size(1)]
    else:
        size = [a.size(1), b.size(1)] if b.dim() == 2 else [a.size(0), a.size(1), b.size(-1)]
    return a.new_empty(size, dtype=out_dtype or a.dtype)


def register_missing() -> None:
    """Registers the kernels above with torch, each once, but for those that torch has itself."""
    for name, overload, kernel in (
        ("_ctc_loss", "Tensor", _ctc_loss),
        ("_ctc_loss_backward", "Tensor", _ctc_loss_backward),
        ("_grouped_mm", "default", _grouped_mm),
        ("multi_margin_loss_backward", "default", _like_input),
        ("multilabel_margin_loss_backward", "default", _like_input),
    ):
        found = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if found is not None and not _is_op_registered_to_fake_rule(found):
            register_op_impl(found)(kernel)
