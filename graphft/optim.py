"""Optimizers, and `minimize`, which appends their ops to a program.

An optimizer is a value with the names and defaults of its torch.optim counterpart; `lr` may be a schedule. Block
`step` then ends with

    schedule ops           %lr (float64[]; %lr_1 ... where parameter groups differ) from %global_step
    clip ops               in place on the gradients
    one optimizer op per parameter: `adam(%w, %w@GRAD, %lr, *state) {...}`, in place on parameter and state
    increment(%global_step)

`%global_step` (int64[]) counts completed steps. State variables are called `<parameter>@<state>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from graphft import registry, schedule
from graphft.errors import GraphftError, ProgramError
from graphft.ir import Arg, Block, Kind, Operator, Program, Type, Variable, grad_name
from graphft.schedule import Rate
from graphft.symbolic import dtype_of

GLOBAL_STEP = "global_step"
"""Name of the variable that counts completed steps."""


@dataclass(frozen=True)
class Optimizer:
    """Base of the optimizers. `op` is the op's type; every field but `lr` that the op knows is its attribute."""

    op: ClassVar[str]
    torch_class: ClassVar[type[torch.optim.Optimizer]]
    lr: Rate

    def __post_init__(self) -> None:
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        try:  # torch checks the ranges of its options: one place for them
            self.torch_class([torch.empty(0)], **(options | {"lr": 0.0 if callable(self.lr) else self.lr}))
        except (TypeError, ValueError, RuntimeError) as error:
            raise GraphftError(f"{type(self).__name__}: {error}", rule="optimizer-option",
                               help=f"see torch.optim.{self.torch_class.__name__} for what the options mean") from error

    def attributes(self) -> dict[str, Arg]:
        """The op's attributes."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in _NO_ATTRIBUTE}

    def state(self) -> dict[str, float]:
        """The op's state operands, in order, and what they are filled with at first."""
        raise NotImplementedError


_NO_ATTRIBUTE = ("lr", "initial_accumulator_value")
SCALAR_STATE = "step"
"""The state that is a 0-dim float32 tensor: this parameter's number of updates. Other state is like the parameter."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: torch.optim.SGD."""

    op: ClassVar[str] = "sgd"
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    lr: Rate = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = field(default=False, kw_only=True)

    def state(self) -> dict[str, float]:
        return {"momentum_buffer": 0.0, "step": 0.0} if self.momentum else {}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; weight decay is L2: torch.optim.Adam."""

    op: ClassVar[str] = "adam"
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = field(default=False, kw_only=True)

    def state(self) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0, "step": 0.0} | ({"max_exp_avg_sq": 0.0} if self.amsgrad else {})


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: torch.optim.AdamW."""

    op: ClassVar[str] = "adamw"
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    weight_decay: float = 1e-2


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad: torch.optim.Adagrad."""

    op: ClassVar[str] = "adagrad"
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adagrad
    lr: Rate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = field(default=False, kw_only=True)

    def state(self) -> dict[str, float]:
        return {"sum": float(self.initial_accumulator_value), "step": 0.0}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop: torch.optim.RMSprop."""

    op: ClassVar[str] = "rmsprop"
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.RMSprop
    lr: Rate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = field(default=False, kw_only=True)

    def state(self) -> dict[str, float]:
        return ({"square_avg": 0.0, "step": 0.0} | ({"momentum_buffer": 0.0} if self.momentum else {})
                | ({"grad_avg": 0.0} if self.centered else {}))


OPTIMIZERS: dict[str, type[Optimizer]] = {c.op: c for c in (SGD, Adam, AdamW, Adagrad, RMSprop)}
OPTIMIZER_OPS = tuple(OPTIMIZERS)
"""Op types whose operands are (param, grad, lr, *state), with state as in `OPTIMIZERS[type](**attrs).state()`."""


@dataclass(frozen=True)
class ClipByValue:
    """Clips every element of every gradient to [-limit, limit], as torch.nn.utils.clip_grad_value_."""

    limit: float

    def __post_init__(self) -> None:
        _positive(self, self.limit)


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """Scales all gradients so that their common 2-norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_.

    It is the norm of the whole, averaged gradient, of all parameters on all shards, in sync mode; it has the same
    bits for any number of shards. In async mode each batch's gradient is clipped by its norm on each shard.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _positive(self, self.max_norm)


CLIP_OPS = ("clip_by_value", "clip_by_global_norm")
"""Op types that clip operand 0, a gradient, in place. Operand 1 of the latter comes from `squared_norms`."""

Clip = ClipByValue | ClipByGlobalNorm


@dataclass(frozen=True)
class Group:
    """Parameters that share an optimizer; `state` holds initial state that differs from the optimizer's own."""

    optimizer: Optimizer
    parameters: tuple[str, ...]
    state: dict[str, Tensor] = field(default_factory=dict)


def minimize(program: Program, optimizer: Optimizer | torch.optim.Optimizer, clip: Clip | None = None, *,
             model: torch.nn.Module | None = None) -> None:
    """Appends to block `step` what evolves the program's parameters (see the module's docstring).

    A torch.optim instance (SGD, Adam, AdamW, Adagrad, RMSprop) needs `model`, the module that the program was built
    from: its parameter groups, with their options and state, are taken over; parameters in no group become frozen.
    Raises GraphftError for a parameter without gradient, an option that is not supported, or a schedule that cannot
    be traced, and if the program is minimized already; the program is then unchanged.
    """
    if "step" not in program.blocks or GLOBAL_STEP in program.variables:
        what = "is minimized already" if "step" in program.blocks else "has no block step"
        raise ProgramError(f"program '{program.name}' {what}", rule="minimize",
                           help="call minimize() once, after build() or append_backward()")
    if isinstance(optimizer, torch.optim.Optimizer):
        from graphft.torch_optim import groups_of

        groups = groups_of(program, optimizer, model)
    elif isinstance(optimizer, Optimizer):
        groups = [Group(optimizer, tuple(v.name for v in program.of_kind(Kind.PARAM)))]
    else:
        raise GraphftError(f"minimize takes an optimizer, got {type(optimizer).__name__}", rule="optimizer-option",
                           help="give graphft.SGD, Adam, AdamW, Adagrad or RMSprop, or a torch.optim instance of these")
    block, group_of = program.blocks["step"], {name: g for g in groups for name in g.parameters}
    parameters = [v for v in program.of_kind(Kind.PARAM) if v.name in group_of]
    _require_gradients(block, parameters)
    rates = {g.optimizer.lr: schedule.trace(g.optimizer.lr) for g in groups}

    for v in program.of_kind(Kind.PARAM):
        v.kind = Kind.PARAM if v.name in group_of else Kind.FROZEN
    step = program.variable(GLOBAL_STEP, Type("int64", ()), Kind.STATE, torch.zeros((), dtype=torch.int64))
    lrs = {rate: schedule.append(block, traced, step, program.fresh("lr")) for rate, traced in rates.items()}
    _append_clip(block, clip, [program.variables[grad_name(v.name)] for v in parameters])
    for v in parameters:
        _append_update(block, v, group_of[v.name], lrs[group_of[v.name].optimizer.lr])
    block.append_op("increment", step)


def _require_gradients(block: Block, parameters: Iterable[Variable]) -> None:
    written = {name for op in block.ops for name in op.writes}
    missing = [v.name for v in parameters if grad_name(v.name) not in written]
    if missing:
        raise ProgramError(f"parameters without gradient: {', '.join(missing)}", rule="no-gradient",
                           help="the loss does not depend on them: use them in the loss, or freeze them with "
                                "requires_grad_(False) before build(); by hand, call append_backward(loss) first")


def _append_clip(block: Block, clip: Clip | None, grads: list[Variable]) -> None:
    if clip is None:
        return
    for g in grads:
        _own(block, g)
    if isinstance(clip, ClipByValue):
        for g in grads:
            block.append_op("clip_by_value", g, limit=float(clip.limit))
    else:
        sqnorm = block.append_op("squared_norms", *grads, outputs=block.program.fresh("sqnorm"))
        for g in grads:
            block.append_op("clip_by_global_norm", g, sqnorm, max_norm=float(clip.max_norm))


def _own(block: Block, grad: Variable) -> None:
    """Gives `grad` memory of its own where it may be a view of another tensor: clipping writes it in place."""
    index = max(i for i, op in enumerate(block.ops) if grad.name in op.writes)
    producer = block.ops[index]
    if not _may_alias(producer):
        return
    view = block.program.fresh(grad.name)
    block.program.variables[view] = Variable(view, grad.type, grad.kind, {}, block.program)
    producer.outputs = tuple(view if o == grad.name else o for o in producer.outputs)
    block.ops.insert(index + 1, Operator("aten.clone", (block.program.variables[view].ref,), {}, (grad.name,)))


def _may_alias(op: Operator) -> bool:
    """Whether torch's schema says that a result shares memory with an operand (views, in-place operators)."""
    schema = getattr(registry.require(op).kernel, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _append_update(block: Block, param: Variable, group: Group, lr: Variable) -> None:
    program, operands = block.program, []
    for name, fill in group.optimizer.state().items():
        state, type = f"{param.name}@{name}", Type("float32", ()) if name == SCALAR_STATE else param.type
        value = group.state.get(state)
        if value is None:
            value = torch.full([int(d) for d in type.shape or ()], fill, dtype=dtype_of(type))
        operands.append(program.variable(state, type, Kind.STATE, value))
    block.append_op(group.optimizer.op, param, program.variables[grad_name(param.name)], lr, *operands,
                    **group.optimizer.attributes())


def _plain(value: object) -> Arg:
    """Options as attributes: bool, float, or tuples of float."""
    if isinstance(value, (tuple, list)):
        return tuple(float(v) for v in value)
    return value if isinstance(value, bool) else float(value)  # type: ignore[arg-type]


def _positive(clip: Clip, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise GraphftError(f"{type(clip).__name__} takes a positive number, got {value!r}", rule="optimizer-option",
                           help="give the limit of the gradients")
