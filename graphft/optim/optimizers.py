"""Optimizers and gradient clipping, as values with the names and defaults of their counterparts in torch.

    graphft.minimize(program, graphft.AdamW(lr=graphft.schedule.cosine(1e-3, 10_000)), graphft.ClipByGlobalNorm(1.0))

Each optimizer has an op of its own (`ops/optimize.py`), with its options as attributes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from graphft.errors import GraphftError
from graphft.ir import Arg
from graphft.schedule import Rate


@dataclass(frozen=True)
class Optimizer:
    """Base of the optimizers. Class and op are named as in torch.optim; fields that the op knows are its attributes."""

    op: ClassVar[str]
    torch_class: ClassVar[type[torch.optim.Optimizer]]
    lr: Rate

    def __init_subclass__(cls) -> None:
        cls.op, cls.torch_class = cls.__name__.lower(), getattr(torch.optim, cls.__name__)

    def __post_init__(self) -> None:
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        try:  # torch checks the ranges of its options: one place for them
            self.torch_class([torch.empty(0)], **(options | {"lr": 0.0 if callable(self.lr) else self.lr}))
        except (TypeError, ValueError, RuntimeError) as error:
            raise GraphftError(
                f"{type(self).__name__}: {error}",
                rule="optimizer-option",
                help=f"options are those of torch.optim.{self.torch_class.__name__}, without parameters; lr is a "
                "number or a schedule: lr=graphft.schedule.cosine(1e-3, 10_000)",
            ) from error

    def attributes(self) -> dict[str, Arg]:
        """The op's attributes."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in NO_ATTRIBUTE}

    def state(self) -> dict[str, float]:
        """The op's state operands, in order, and what they are filled with at first."""
        raise NotImplementedError


NO_ATTRIBUTE = ("lr", "initial_accumulator_value")
SCALAR_STATE = "step"
"""The state that is a 0-dim float32 tensor: this parameter's number of updates. Other state is like the parameter."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: torch.optim.SGD."""

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

    weight_decay: float = 1e-2


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad: torch.optim.Adagrad."""

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

    lr: Rate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = field(default=False, kw_only=True)

    def state(self) -> dict[str, float]:
        return (
            {"square_avg": 0.0, "step": 0.0}
            | ({"momentum_buffer": 0.0} if self.momentum else {})
            | ({"grad_avg": 0.0} if self.centered else {})
        )


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


def _plain(value: object) -> Arg:
    """Options as attributes: bool, float, or tuples of float."""
    if isinstance(value, (tuple, list)):
        return tuple(float(v) for v in value)
    return value if isinstance(value, bool) else float(value)  # type: ignore[arg-type]


def _positive(clip: Clip, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise GraphftError(
            f"{type(clip).__name__} takes a positive number, got {value!r}",
            rule="optimizer-option",
            help="give the limit of the gradients",
        )


@dataclass(frozen=True)
class Group:
    """Parameters that share an optimizer; `state` holds initial state that differs from the optimizer's own."""

    optimizer: Optimizer
    parameters: tuple[str, ...]
    state: dict[str, Tensor] = field(default_factory=dict)
