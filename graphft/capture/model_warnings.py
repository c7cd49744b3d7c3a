"""Warnings about a model: its mode when it is captured, values that are not finite, changes after it was copied."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from graphft.capture.weights import changed_weights
from graphft.errors import GraphftError
from graphft.ir import Kind, Program, Variable
from graphft.optim.from_torch import options_of
from graphft.optim.optimizers import Optimizer

log = logging.getLogger("graphft")

SHOWN = 5
"""Names of modules or parameters that a line lists."""


def tell_mode(model: nn.Module) -> None:
    """A warning if `model` is in eval mode and has parts that are otherwise in training; a line on what is frozen.

    Only the mode of the whole model counts: a part that is in eval mode alone is meant to be.
    """
    other = {name or "the model": effect for name, m in model.named_modules() if (effect := _effect(m))}
    if not model.training and other:
        log.warning(
            "the model is captured in eval mode: %s (%s); it is meant so for graphft.Validation; if it is to train as "
            "usual, call model.train() before build()",
            " and ".join(dict.fromkeys(other.values())),
            listed(list(other)),
        )
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        log.info("frozen, by requires_grad=False: %s", listed(frozen))


def listed(names: Sequence[str]) -> str:
    """`a, b, c`, of many the first ones."""
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    return ", ".join(names[:SHOWN]) + more


def _effect(module: nn.Module) -> str:
    """What eval mode changes in `module` itself, not in its parts; "" if nothing."""
    if isinstance(module, _DropoutNd):
        return "dropout is off" * (module.p > 0)
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return "dropout is off" * (module.dropout > 0)
    if isinstance(module, _NormBase):
        return "normalization uses its running statistics, and keeps them" * module.track_running_stats
    if type(module).__module__.startswith("torch."):
        return ""
    code = getattr(type(module).forward, "__code__", None)
    return "code that asks self.training sees False" * ("training" in getattr(code, "co_names", ()))


def tell_nonfinite(program: Program, when: str) -> None:
    """A warning if a parameter or a buffer is not finite: a damaged file of weights, say."""
    wild = [
        f"{'buffer' if v.kind is Kind.BUFFER else 'parameter'} {v.name}"
        for v in program.of_kind(Kind.PARAM, Kind.FROZEN, Kind.BUFFER)
        if v.name in program.values and _is_wild(v, program.values[v.name])
    ]
    if wild:
        log.warning(
            "%s of program '%s' is not finite %s%s: look at what it was loaded from",
            wild[0],
            program.name,
            when,
            f", and so are {len(wild) - 1} others" * (len(wild) > 1),
        )


def _is_wild(variable: Variable, value: Tensor) -> bool:
    """A mask has -inf with good reason: in a buffer that is none."""
    if not value.is_floating_point():
        return False
    if value.element_size() == 1:  # float8: few ops take it
        value = value.float()
    if variable.kind is Kind.BUFFER:
        value = value.nan_to_num(nan=float("nan"), neginf=0.0, posinf=float("inf"))
    return not bool(value.isfinite().all())


@dataclass(frozen=True)
class TakenOver:
    """A torch.optim instance, and what its groups were when `minimize` took them over. `parameters`: how many."""

    optimizer: torch.optim.Optimizer
    options: list[Optimizer]
    parameters: list[int]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> TakenOver:
        return TakenOver(optimizer, options_of(optimizer), _parameters(optimizer))

    def changes(self) -> str:
        """What was changed since, and what to do; "" if nothing was."""
        try:
            now = options_of(self.optimizer)
        except GraphftError as error:
            return f"{error.message}: {error.help}"
        if _parameters(self.optimizer) != self.parameters:
            return "its parameter groups: make them before minimize()"
        options = ", ".join(
            f"{field.name} {before!r} -> {after!r}" + f" of group {number}" * (len(now) > 1)
            for number, (old, new) in enumerate(zip(self.options, now, strict=True))
            for field in fields(old)
            if (before := getattr(old, field.name)) != (after := getattr(new, field.name))
        )
        return f"{options}: set them before minimize()" if options else ""


def _parameters(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def tell_changed_weights(program: Program) -> None:
    """A warning if the weights of the model are others than those that the program begins with."""
    if (
        program.origin is not None
        and not program.loaded
        and (changed := changed_weights(program, program.origin.model))
    ):
        log.warning(
            "the model's weights are others than those that build() copied, with which training begins: %s; load "
            "weights before build(), or give transpile(init_from=model.state_dict())",
            listed(changed),
        )


def tell_changed_optimizer(program: Program) -> None:
    """A warning if options of the torch.optim instance are others than `minimize` took over, or a scheduler was
    attached to it since."""
    if program.taken_over is not None and (changed := program.taken_over.changes()):
        log.warning(
            "the optimizer was changed after minimize(), which copied it, and the job trains without that: %s", changed
        )
