"""`minimize` appends to a program what evolves its parameters.

Block `step` then ends with

    schedule ops           %lr (float64[]; %lr_1 ... where parameter groups differ) from %global_step
    clip ops               in place on the gradients
    one optimizer op per parameter: `adam(%w, %w@GRAD, %lr, *state) {...}`, in place on parameter and state
    increment(%global_step)

`%global_step` (int64[]) counts completed steps. State variables are called `<parameter>@<state>`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from graphft import schedule
from graphft.capture.model_warnings import TakenOver, listed
from graphft.capture.weights import require_unchanged
from graphft.errors import GraphftError, ProgramError, UsageError
from graphft.ir import Block, Kind, Operator, Program, Ref, Type, Variable, grad_name, registry
from graphft.ir.literals import dtype_of
from graphft.optim.from_torch import groups_of
from graphft.optim.optimizers import SCALAR_STATE, Clip, ClipByValue, Group, Optimizer
from graphft.optim.refused_scheduler import refused_scheduler

log = logging.getLogger(__name__)

GLOBAL_STEP = "global_step"
"""Name of the variable that counts completed steps."""


def minimize(
    program: Program,
    optimizer: Optimizer | torch.optim.Optimizer,
    clip: Clip | None = None,
    *,
    model: torch.nn.Module | None = None,
) -> None:
    """Appends to block `step` what evolves the program's parameters (see the module's docstring).

    A torch.optim instance (SGD, Adam, AdamW, Adagrad, RMSprop) needs `model`, the module that the program was built
    from: its parameter groups, with their options and state, are taken over; parameters in no group become frozen.
    Raises GraphftError for a parameter without gradient, an option that is not supported, or a schedule that cannot
    be traced, if the program is minimized already, and if the weights of `model` were changed since it was built; the
    program is then unchanged.
    """
    if "step" not in program.blocks or GLOBAL_STEP in program.variables:
        what = "is minimized already" if "step" in program.blocks else "has no block step"
        raise ProgramError(
            f"program '{program.name}' {what}",
            rule="minimize",
            help="call minimize() once, after build() or append_backward()",
        )
    if model is not None:
        require_unchanged(program, model)
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = groups_of(program, optimizer, model)
    elif isinstance(optimizer, Optimizer):
        groups = [Group(optimizer, tuple(v.name for v in program.of_kind(Kind.PARAM)))]
    elif isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        raise refused_scheduler(type(optimizer).__name__, "is no optimizer")
    else:
        raise GraphftError(
            f"minimize takes an optimizer, got {type(optimizer).__name__}",
            rule="optimizer-option",
            help="give graphft.SGD, Adam, AdamW, Adagrad or RMSprop, or a torch.optim instance of these",
        )
    if not isinstance(clip, (Clip, type(None))):
        raise UsageError(
            f"a clip is expected, got {clip!r}",
            rule="optimizer-option",
            help="write graphft.ClipByGlobalNorm(1.0), or graphft.ClipByValue(limit)",
        )
    block, group_of = program.blocks["step"], {name: g for g in groups for name in g.parameters}
    parameters = [v for v in program.of_kind(Kind.PARAM) if v.name in group_of]
    _require_gradients(block, parameters)
    rates = {g.optimizer.lr: schedule.trace(g.optimizer.lr) for g in groups}

    _tell_left_out([v.name for v in program.of_kind(Kind.PARAM) if v.name not in group_of])
    for v in program.of_kind(Kind.PARAM):
        v.kind = Kind.PARAM if v.name in group_of else Kind.FROZEN
    step = program.variable(GLOBAL_STEP, Type("int64", ()), Kind.STATE, torch.zeros((), dtype=torch.int64))
    lrs = {rate: schedule.append(block, traced, step, program.fresh("lr")) for rate, traced in rates.items()}
    _append_clip(block, clip, [program.variables[grad_name(v.name)] for v in parameters])
    for v in parameters:
        _append_update(block, v, group_of[v.name], lrs[group_of[v.name].optimizer.lr])
    block.append_op("increment", step)
    if isinstance(optimizer, torch.optim.Optimizer):
        program.taken_over = TakenOver.of(optimizer)


def _tell_left_out(names: Sequence[str]) -> None:
    if names:
        count = "1 parameter is" if len(names) == 1 else f"{len(names)} parameters are"
        log.warning("%s in no group of the optimizer, and will not train: %s", count, listed(names))


def _require_gradients(block: Block, parameters: Iterable[Variable]) -> None:
    written = {name for op in block.ops for name in op.writes}
    missing = [v.name for v in parameters if grad_name(v.name) not in written]
    if missing:
        raise ProgramError(
            f"parameters without gradient: {', '.join(missing)}",
            rule="no-gradient",
            help="the loss does not depend on them: use them in the loss, or freeze them with "
            "requires_grad_(False) before build(); by hand, call append_backward(loss) first",
        )


def _append_clip(block: Block, clip: Clip | None, grads: list[Variable]) -> None:
    if clip is None:
        return
    _own(block, grads)
    if isinstance(clip, ClipByValue):
        for g in grads:
            block.append_op("clip_by_value", g, limit=float(clip.limit))
    else:
        sqnorm = block.append_op("squared_norms", *grads, outputs=block.program.fresh("sqnorm"))
        for g in grads:
            block.append_op("clip_by_global_norm", g, sqnorm, max_norm=float(clip.max_norm))


def _own(block: Block, grads: Sequence[Variable]) -> None:
    """Gives gradients memory of their own, which clipping writes in place: views that share theirs are copied."""
    producers = {name: op for op in block.ops for name in op.writes}
    taken: set[str] = set()
    for grad in grads:
        origin, overlaps = _origin(grad.name, producers)
        if overlaps or origin in taken or origin not in producers:
            _copy(block, grad, producers[grad.name])
        taken.add(origin)


def _origin(name: str, producers: Mapping[str, Operator]) -> tuple[str, bool]:
    """The variable whose memory `name` is a view of, and whether several of its elements may be the same memory."""
    overlaps = False
    while (op := producers.get(name)) is not None and op.reads:
        schema = getattr(registry.require(op).kernel, "_schema", None)
        if schema is None or all(r.alias_info is None for r in schema.returns):
            break
        overlaps |= op.type.startswith("aten.expand")
        name = op.reads[0]
    return name, overlaps


def _copy(block: Block, grad: Variable, producer: Operator) -> None:
    view = block.program.fresh(grad.name)
    block.program.variables[view] = replace(grad, name=view)
    producer.outputs = tuple(view if o == grad.name else o for o in producer.outputs)
    index = next(i for i, op in enumerate(block.ops) if op is producer)
    block.ops.insert(index + 1, Operator("aten.clone", (Ref(view),), {}, (grad.name,)))


def _append_update(block: Block, param: Variable, group: Group, lr: Variable) -> None:
    program, operands = block.program, []
    for name, fill in group.optimizer.state().items():
        state, type = f"{param.name}@{name}", Type("float32", ()) if name == SCALAR_STATE else param.type
        value = group.state.get(state)
        if value is None:
            value = torch.full([int(d) for d in type.shape or ()], fill, dtype=dtype_of(type))
        operands.append(program.variable(state, type, Kind.STATE, value))
    block.append_op(
        group.optimizer.op,
        param,
        program.variables[grad_name(param.name)],
        lr,
        *operands,
        **group.optimizer.attributes(),
    )
