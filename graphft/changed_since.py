"""What a script changes after `build` and `minimize`, which copied it: the job trains without that."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

import torch

from graphft.errors import GraphftError
from graphft.ir import Program
from graphft.mode import listed
from graphft.optim import Optimizer
from graphft.torch_optim import options_of
from graphft.weights import changed_weights

log = logging.getLogger("graphft")


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
