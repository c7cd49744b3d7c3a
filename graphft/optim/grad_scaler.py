"""Scales the loss, as float16 needs it and torch.amp.GradScaler does, in the program itself.

    graphft.minimize(program, graphft.AdamW(lr=1e-3), grad_scaler=graphft.GradScaler())

Backward begins with `%loss_scale` instead of 1, and each gradient is multiplied by its inverse where it is made:

    %loss@GRAD = aten._to_copy(%loss_scale) {dtype = torch.float32}
    ...                                                                  backward, of `%w@SCALED`
    %w@GRAD = aten.mul.Tensor(%w@SCALED, %inv_scale)
    update_scale(%loss_scale, %loss_scale@growth_tracker) {...}

The scale is a buffer, so one pserver holds it and trainers receive it with the parameters of the step. A job leaves out
a step that is not finite (`on_nonfinite="skip"`), and that pserver lowers the scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import Meta

from graphft.capture.eager_program import HALF
from graphft.errors import UsageError
from graphft.ir import Arg, Block, Kind, Operator, Ref, Type, Variable, grad_name, map_refs
from graphft.ir.dependence import last_writes
from graphft.ir.literals import dtype_of, literal
from graphft.options import check_values

UPDATE = "update_scale"


@dataclass(frozen=True)
class GradScaler:
    """Holds the options of the loss scale, with the names and defaults of torch.amp.GradScaler.

    A step with a gradient that is not finite multiplies it by `backoff_factor`, `growth_interval` steps without one by
    `growth_factor`."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        limits = {"init_scale": Meta(gt=0, le=2.0**127), "growth_factor": Meta(gt=1, le=2.0**127)}
        check_values(self, limits | {"backoff_factor": Meta(gt=0, lt=1), "growth_interval": Meta(ge=1, le=2**31 - 1)})

    def attributes(self) -> dict[str, Arg]:
        """Returns the attributes of `update_scale`."""
        factors = {"growth_factor": float(self.growth_factor), "backoff_factor": float(self.backoff_factor)}
        return {**factors, "growth_interval": self.growth_interval}


def find_seed(block: Block, parameters: Sequence[Variable]) -> Operator:
    """Returns the op that backward begins with: the gradient of the loss, or all of a step that is one op. Raises
    UsageError for what cannot be scaled."""
    loss = str(block.program.attrs.get("loss"))
    found = [op for op in block.ops if op.type == "eager_step" or _is_seed(op, loss)]
    if len(found) != 1:
        raise UsageError(
            f"the gradient of the loss is made by {len(found)} ops aten.ones_like(%{loss}), expected one: it is not "
            "known what to scale",
            rule="grad-scaler",
            help="leave torch.ones_like(loss, memory_format=...) out of loss_fn; by hand, call append_backward(loss)",
        )
    if other := [v for v in parameters if v.dtype not in ("float32", "float64")]:
        raise UsageError(
            f"a gradient scaler is for parameters of float32, %{other[0].name} is {other[0].dtype}",
            rule="grad-scaler",
            help="keep the model in float32: torch.autocast computes in float16",
        )
    return found[0]


def computes_half(block: Block) -> bool:
    """True if an op behind the loss makes float16: gradients are computed in it, and those below 6e-8 are 0."""
    program = block.program
    behind = next((i for i, op in enumerate(block.ops) if program.attrs.get("loss") in op.writes), 0)
    made = (program.variables[name].dtype for op in block.ops[behind + 1 :] for name in op.writes)
    return bool(program.attrs.get(HALF)) or "float16" in made


def _is_seed(op: Operator, loss: str) -> bool:
    """True for the ones that autograd, or a program by hand, begins with; `loss_fn` itself may make some, too."""
    named = "memory_format" in op.attrs or op.outputs == (grad_name(loss),)
    return op.type == "aten.ones_like" and op.args == (Ref(loss),) and named


def scale_gradients(block: Block, seed: Operator, scaler: GradScaler, parameters: Sequence[Variable]) -> Operator:
    """Scales what backward begins with, and each gradient back. Returns the op that evolves the scale."""
    program, last = block.program, last_writes(block)
    value, none = torch.tensor(scaler.init_scale, dtype=torch.float32), torch.zeros((), dtype=torch.int32)
    scale = program.variable(program.fresh("loss_scale"), Type("float32", ()), Kind.BUFFER, value, persistent=False)
    tracker = program.variable(f"{scale.name}@growth_tracker", Type("int32", ()), Kind.STATE, none)
    head, names = Block("head", program), dict[str, str]()
    if seed.type == "eager_step":
        seed.args = (*seed.args, scale.ref)
    else:
        loss, (made,) = program.variables[str(program.attrs["loss"])], seed.writes
        del program.variables[made]
        names[made] = program.fresh(grad_name(loss.name))
        head.append_op("aten._to_copy", scale, dtype=literal(dtype_of(loss.type)), outputs=names[made])
    wide = head.append_op("aten._to_copy", scale, dtype=literal(torch.float64))
    narrow = {"dtype": literal(torch.float32), "outputs": program.fresh("inv_scale")}
    inverse = head.append_op("aten._to_copy", head.append_op("aten.reciprocal", wide), **narrow)
    behind = defaultdict[int, list[Operator]](list)
    for v in parameters:
        gradient = program.variables[grad_name(v.name)]
        scaled = names[gradient.name] = program.fresh(f"{v.name}@SCALED")
        program.variables[scaled] = replace(gradient, name=scaled)
        unscale = Operator("aten.mul.Tensor", (Ref(scaled), inverse.ref), {}, (gradient.name,))
        behind[last[gradient.name]].append(unscale)  # not at the end: it is sent as soon as it is there
    ops: list[Operator] = []
    for i, op in enumerate(block.ops):
        ops += head.ops if op is seed else ()
        ops += [_renamed(op, names)] if op is not seed or op.type == "eager_step" else ()
        ops += behind[i]
    block.ops[:] = ops
    program.attrs["extras"] = (*program.attrs.get("extras", ()), scale.name)
    return Operator(UPDATE, (scale.ref, tracker.ref), scaler.attributes())


def _renamed(op: Operator, names: dict[str, str]) -> Operator:
    def new(ref: Ref) -> Ref:
        return Ref(names.get(ref.name, ref.name))

    attrs = {name: map_refs(value, new) for name, value in op.attrs.items()}
    outputs = tuple(o and names.get(o, o) for o in op.outputs)
    return replace(op, args=map_refs(op.args, new), attrs=attrs, outputs=outputs)
