"""The user's own module as an op: the step of a program that was built with `capture=False`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphft.capture.module_pickle import Packed, unpack
from graphft.capture.module_step import ModuleStep
from graphft.errors import UsageError
from graphft.ir import Block, Operator, Type
from graphft.ir.registry import op
from graphft.ops.context import Context


def _declared(operator: Operator, block: Block) -> Sequence[Type]:
    return [block.program.variables[name].type for name in operator.writes]


@op("eager_step", infer=_declared, writes=("buffers",), effect=True)
def eager_step(
    ctx: Context, code: Tensor, inputs: Any, parameters: Any, fixed: Any, buffers: Any, *scale: Tensor, source: str
) -> tuple[Tensor, ...]:
    """Runs the pickled module and loss under torch's autograd: forward, backward, and what they do to buffers.

    Operands are lists: the batch, parameters that are trained, tensors that stay, buffers that the step changes.
    Results are the loss, the tensors that `loss_fn` returns beside it, and a gradient for each parameter (zeros where
    the loss does not depend on it), times `scale`, if it is given. Random numbers come from torch's default generator.
    `source`: a digest of the code.
    """
    packed, results, changed = _run(ctx, code, source, inputs, (*parameters, *fixed, *buffers), *scale)
    for name, buffer in zip(packed.written, buffers, strict=True):
        if name in changed:
            buffer.copy_(changed.pop(name))
    if changed:
        raise UsageError(
            f"the step changes {', '.join(changed)}, which it did not on the batch that build() ran it on",
            rule="example",
            help="give build(..., capture=False, example={...}) a batch on which it changes all that it ever changes",
        )
    return results


@op("eager_forward", infer=_declared)
def eager_forward(ctx: Context, code: Tensor, inputs: Any, tensors: Any, *, source: str) -> Any:
    """Runs the pickled module and loss in eval mode, without gradients: for validation and prediction."""
    _, results, changed = _run(ctx, code, source, inputs, tensors)
    if changed:
        raise UsageError(
            f"the model changes {', '.join(changed)} in eval mode",
            rule="option",
            help="let the model change its buffers in train mode only (if self.training)",
        )
    return results if len(results) > 1 else results[0]


def _run(
    ctx: Context,
    code: Tensor,
    source: str,
    inputs: Sequence[Tensor],
    tensors: Sequence[Tensor],
    scale: Tensor | None = None,
) -> tuple[Packed, tuple[Tensor, ...], dict[str, Tensor]]:
    """Returns the module, which each context unpickles once; the results, as the program names them; the buffers that
    the step has changed."""
    packed = ctx.modules.get(id(code))
    if packed is None:
        packed = ctx.modules[id(code)] = unpack(code, source)
        packed.model.to(ctx.device)
    step = ModuleStep(packed.model, packed.call, packed.training, packed.draws)
    feeds = dict(zip(packed.inputs, inputs, strict=True))
    results, changed = step.run(dict(zip(packed.tensors, tensors, strict=True)), feeds, scale=scale)
    if differing := results.keys() ^ set(packed.results):
        raise UsageError(
            f"the step gives other results than when the program was built: {', '.join(sorted(differing))}",
            rule="example",
            help="return the same names at each step, and freeze parameters before build()",
        )
    return packed, tuple(results[name] for name in packed.results), changed
