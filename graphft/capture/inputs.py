"""What `build` is told of a program's inputs: their shapes and dtypes, and how `loss_fn` gets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphft.errors import GraphftError, UsageError
from graphft.ir import Dim, Type

LossFn = Callable[..., Tensor | tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a program. In `shape`, a number is a fixed size, a string names a dimension (inputs that name the
    same one have the same size there), None in front is the dimension `batch`, and None elsewhere one of its own."""

    shape: tuple[int | str | None, ...]
    dtype: torch.dtype = torch.float32


def input_type(name: str, spec: Input | Sequence[Any]) -> Type:
    """The type of input `name`; None and names in its shape become dimensions. Raises GraphftError[inputs]."""
    if isinstance(spec, str):  # a sequence, too
        raise _bad_input(name, f"got {spec!r}")
    if not isinstance(spec, Input):
        try:
            if len(spec) == 2 and isinstance(spec[0], (tuple, list)) and not isinstance(spec[1], torch.dtype):
                raise _bad_dtype(name, *spec)
            pair = len(spec) == 2 and isinstance(spec[1], torch.dtype)
            spec = Input(tuple(spec[0]), spec[1]) if pair else Input(tuple(spec))
        except TypeError:
            raise _bad_input(name, f"got {spec!r}") from None
    if not name.isidentifier() or name == "loss":
        raise _bad_input(name, "its name must be an identifier other than 'loss'")
    dims: list[Dim] = []
    for axis, size in enumerate(spec.shape):
        if size is None:
            dims.append("batch" if axis == 0 else f"{name}_dim{axis}")
        elif (isinstance(size, str) and size.isidentifier()) or (isinstance(size, int) and size >= 0):
            dims.append(size)
        else:
            raise _bad_input(name, f"size {size!r} is neither a number, None nor an identifier")
    return Type(str(spec.dtype).removeprefix("torch."), tuple(dims))


def _bad_input(name: str, what: str, help: str = "") -> GraphftError:
    return GraphftError(
        f"input {name!r}: {what}",
        rule="inputs",
        help=help or "write (None, 8), or ((None,), torch.int64), or graphft.Input(shape, dtype)",
    )


def _bad_dtype(name: str, shape: Sequence[Any], dtype: Any) -> GraphftError:
    text = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
    meant = torch.int64 if dtype is int else getattr(torch, text, None)
    if not isinstance(meant, torch.dtype):
        meant = torch.int64
    what = f"{dtype!r} is a {type(dtype).__name__}, expected a torch.dtype"
    return _bad_input(name, what, f"write ({tuple(shape)}, {meant})")


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
