"""What `loss_fn` returns: the loss, and beside it tensors by name.

Those that are one float are *metrics*: means over the samples of the batch, as the loss is. A job records them with the
loss. Others (logits, say) can be fetched from an `Executor`; a job has no place for them, so `transpile` refuses them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import SymFloat, SymInt, Tensor

from graphft.errors import GraphftError, UsageError
from graphft.ir import Program
from graphft.ir.printer import NAME

TAKEN = ("loss", "global_step")
"""The names of the loss, and of what `minimize` counts steps with."""
TOLD = ("step", "epoch", "samples", "discarded", "steps", "seconds", "failures", "preemptions")
"""What callbacks and `Trainer.train()` are told beside the metrics."""
_SHAPE = "return the loss from loss_fn, or (loss, {'accuracy': tensor})"


def loss_and_extras(result: Any, taken: Collection[str], training: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss: a float of shape [], for `training` one that depends on a parameter; the tensors beside it by name).

    Raises GraphftError[loss] for anything else, and for a name that is in `taken`: an input's or a parameter's.
    """
    loss, extras = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    _check_loss(loss, training)
    if not isinstance(extras, Mapping):
        raise _fail(f"the second result of loss_fn must be a dict of tensors, got {type(extras).__name__}", _SHAPE)
    for name, value in extras.items():
        if not isinstance(value, Tensor):
            raise _fail(
                f"loss_fn returns {name!r} as {_kind(value)}, expected a tensor",
                "compute it with torch, and leave out float() and .item(): a Python number is the same at every step",
            )
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise _fail(
                f"loss_fn returns a tensor under {name!r}, expected a name of letters, digits, '_' and '.'", "rename it"
            )
        if name in TAKEN or name in taken:
            raise _fail(f"'{name}' is returned by loss_fn, but names something else already", "rename it")
    return loss, dict(extras)


def check_metrics(program: Program) -> None:
    """Raises GraphftError[metrics] if the program has a result beside the loss that a job cannot record."""
    for name in program.attrs.get("extras", ()):
        type = program.variables[name].type
        if type.shape != () or not type.dtype.startswith(("float", "bfloat")):
            raise GraphftError(
                f"loss_fn returns '{name}' beside the loss as {type}; a job records floats of shape [], means over "
                "the samples of the batch",
                rule="metrics",
                help=f"return its mean ((predicted == y).float().mean(), for an accuracy), or leave '{name}' out",
            )


def check_told(metrics: Sequence[str]) -> None:
    """Raises UsageError for a metric that would stand in the place of what callbacks and `train()` are told beside
    it."""
    if taken := [name for name in metrics if name in TOLD]:
        raise UsageError(
            f"loss_fn returns '{taken[0]}', which names something else in what callbacks and train() are told",
            rule="metrics",
            help="rename it",
        )


def reported(program: Program) -> tuple[str, ...]:
    """The variables that a trainer reports of each batch: the loss, then the metrics."""
    return str(program.attrs["loss"]), *program.attrs.get("extras", ())


def _check_loss(loss: Any, training: bool) -> None:
    if not isinstance(loss, Tensor):
        raise _fail(f"the loss must be a tensor, got {type(loss).__name__}", _SHAPE)
    if loss.dim() != 0 or not loss.dtype.is_floating_point:
        raise _fail(
            f"the loss must be one float, got {str(loss.dtype).removeprefix('torch.')} of shape "
            f"({', '.join(map(str, loss.shape))})",
            "take its mean over the batch",
        )
    if training and not loss.requires_grad:
        raise _fail(
            "the loss depends on no trainable parameter",
            "compute it from the model's output, without detach(), no_grad() or argmax()",
        )


def _kind(value: Any) -> str:
    numbers = (int, float, SymInt, SymFloat)
    return "a Python number" if isinstance(value, numbers) and not isinstance(value, bool) else type(value).__name__


def _fail(message: str, help: str) -> GraphftError:
    return GraphftError(message, rule="loss", help=help)
