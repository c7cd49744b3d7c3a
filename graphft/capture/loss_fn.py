"""Checks what `build` is told of a step: its inputs, what `loss_fn` takes, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphft.errors import GraphftError, UsageError
from graphft.ir import Dim, Program, Type
from graphft.ir.printer import NAME

LossFn = Callable[..., Tensor | tuple[Tensor, Mapping[str, Tensor]]]


def input_type(name: str, spec: Sequence[Any]) -> Type:
    """Returns the type of input `name`. `spec` is a shape, for float32, or a pair of shape and dtype.

    A number is a fixed size, a string names a dimension, None in front is the dimension `batch`, and None elsewhere one
    of its own. Raises GraphftError[inputs].
    """
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        raise _bad_input(name, f"got {spec!r}")
    shape, dtype = spec if len(spec) == 2 and isinstance(spec[0], (tuple, list)) else (spec, torch.float32)
    if not name.isidentifier() or name == "loss":
        raise _bad_input(name, "its name must be an identifier other than 'loss'")
    if not isinstance(dtype, torch.dtype):
        raise _bad_input(name, f"dtype {dtype!r} is no torch.dtype")
    dims: list[Dim] = []
    for axis, size in enumerate(shape):
        if size is None:
            dims.append("batch" if axis == 0 else f"{name}_dim{axis}")
        elif (isinstance(size, str) and size.isidentifier()) or (isinstance(size, int) and size >= 0):
            dims.append(size)
        else:
            raise _bad_input(name, f"size {size!r} is neither a number, None nor an identifier")
    return Type(str(dtype).removeprefix("torch."), tuple(dims))


def _bad_input(name: str, what: str) -> GraphftError:
    help = "write (None, 8), or ((None,), torch.int64)"
    return GraphftError(f"input {name!r}: {what}", rule="inputs", help=help)


def check_names(loss_fn: LossFn, inputs: Sequence[str]) -> None:
    """Raises UsageError[inputs] if `loss_fn` cannot be called with a model and the inputs by name."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # not every callable has one
        return
    try:
        signature.bind(None, **dict.fromkeys(inputs))
    except TypeError as error:
        raise UsageError(
            f"loss_fn{signature} cannot be called as loss_fn(model, {', '.join(f'{n}={n}' for n in inputs)}): {error}",
            rule="inputs",
            help="inputs are passed by name, behind the model: call an input and the parameter of loss_fn that it is "
            "for the same, or name the inputs of the loss in targets=[...]",
        ) from error


def with_targets(loss_fn: LossFn, specs: Mapping[str, Type], targets: Sequence[str]) -> LossFn:
    """`loss_fn(output, *targets)` as a function of model and inputs. Raises GraphftError[inputs]."""
    unknown = [t for t in targets if t not in specs]
    if unknown or len(targets) == len(specs):
        raise GraphftError(
            f"targets {list(targets)} must be some of the inputs {list(specs)}, but not all",
            rule="inputs",
            help="name the inputs that go to the loss and not to the model",
        )

    def call(model: nn.Module, **inputs: Tensor) -> Any:
        return loss_fn(model(*(v for n, v in inputs.items() if n not in targets)), *(inputs[t] for t in targets))

    return call


# -- results ------------------------------------------------------------------------------------------------------

TAKEN = ("loss", "global_step")
"""The names of the loss, and of what `minimize` counts steps with."""
TOLD = ("step", "epoch", "samples", "discarded", "steps", "seconds", "failures", "preemptions")
"""Names of what callbacks and `Trainer.train()` get beside the metrics."""


def loss_and_extras(result: Any, taken: Collection[str], training: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss, one float (for `training` one that depends on a parameter), and the tensors beside it.

    Raises GraphftError[loss] for anything else, and for a name that is in `taken`: an input's or a parameter's.
    """
    loss, extras = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.dtype.is_floating_point:
        raise _fail(f"the loss must be one float, got {shown(loss)}", "take its mean over the batch")
    if training and not loss.requires_grad:
        raise _fail(
            "the loss depends on no trainable parameter",
            "compute it from the model's output, without detach(), no_grad() or argmax()",
        )
    if not isinstance(extras, Mapping):
        help = "return the loss from loss_fn, or (loss, {'accuracy': tensor})"
        raise _fail(f"the second result of loss_fn must be a dict of tensors, got {shown(extras)}", help)
    for name, value in extras.items():
        if not isinstance(value, Tensor):
            raise _fail(
                f"loss_fn returns {name!r} as {shown(value)}, expected a tensor",
                "compute it with torch, and leave out float() and .item(): a Python number is the same at every step",
            )
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in TAKEN or name in taken:
            raise _fail(
                f"loss_fn returns a tensor under {name!r}, expected a name of letters, digits, '_' and '.' that is not "
                "the loss's, an input's, a parameter's or a buffer's",
                "rename it",
            )
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
    """Raises UsageError for a metric whose name has another meaning in what callbacks and `train()` get."""
    if taken := [name for name in metrics if name in TOLD]:
        raise UsageError(
            f"loss_fn returns '{taken[0]}', which names something else in what callbacks and train() get",
            rule="metrics",
            help="rename it",
        )


def reported(program: Program) -> tuple[str, ...]:
    """The variables that a trainer reports of each batch: the loss, then the metrics."""
    return str(program.attrs["loss"]), *program.attrs.get("extras", ())


def shown(value: Any) -> str:
    """Describes a value: of a tensor dtype and shape, else the type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return f"a {type(value).__name__}"


def _fail(message: str, help: str) -> GraphftError:
    return GraphftError(message, rule="loss", help=help)
