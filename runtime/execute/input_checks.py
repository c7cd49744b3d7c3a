"""Checks what is fed to a program before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphft.errors import GraphftError, ProgramError
from graphft.ir import Block, Kind, Program, Variable
from graphft.ir.literals import dtype_of, evaluate, names_in


def check_feed(
    block: Block, feed: Mapping[str, Any], device: str | torch.device, needed: Sequence[str]
) -> dict[str, Any]:
    """`feed` as tensors on `device`, if it is all of the `needed` inputs, and inputs only.

    Raises ProgramError[feed] for missing and unknown names, dtypes, ranks and sizes that differ from the program's,
    one dimension with two sizes, and sizes for which the program was not captured.
    """
    program = block.program
    inputs = {v.name: v for v in program.of_kind(Kind.INPUT)}
    if unknown := [n for n in feed if n not in inputs]:
        what = f"'{unknown[0]}' is fed, but is no input of program '{program.name}'"
        raise _error(block, what, f"its inputs are {', '.join(inputs) or 'none'}")
    if missing := [n for n in needed if n not in feed]:
        what = f"input %{missing[0]} ({inputs[missing[0]].type}) is not fed"
        raise _error(block, what, f"give feed={{{missing[0]!r}: ...}}")
    values = {n: _value(block, inputs[n], value, device) for n, value in feed.items()}
    check_dims(program, {n: v for n, v in values.items() if isinstance(v, torch.Tensor)})
    return values


def check_dims(program: Program, values: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of the named dimensions. Raises ProgramError[feed] when they contradict each other or the program."""
    dims: dict[str, int] = {}
    sizes = [
        (name, expected, size)
        for name, value in values.items()
        for expected, size in zip(program.variables[name].shape, value.shape, strict=True)
    ]
    for _, expected, size in sizes:
        if isinstance(expected, str) and names_in(expected) == {expected}:
            dims.setdefault(expected, size)
    for name, expected, size in sizes:
        if names_in(expected) <= dims.keys() and (wanted := evaluate(expected, dims)) != size:
            what = f"input %{name} must be {program.variables[name].type}, got size {size} where {expected} is {wanted}"
            raise _error(None, what, "feed inputs of one batch, and of the program's sizes")
    for condition, loc in program.attrs.get("assume", ()):
        if names_in(condition) <= dims.keys() and not evaluate(condition, dims):
            got = ", ".join(f"{n} = {dims[n]}" for n in sorted(names_in(condition)))
            what = f"program '{program.name}' was captured for {condition} only ({loc} decides on it), got {got}"
            raise _error(None, what, "feed another size, or capture a program for this one")
    return dims


def _value(block: Block, var: Variable, value: Any, device: str | torch.device) -> Any:
    if not var.type.is_tensor:
        if type(value).__name__ != var.dtype and var.dtype in ("int", "float", "bool"):
            what = f"input %{var.name} must be a Python {var.dtype}, got {type(value).__name__}"
            raise _error(block, what, f"convert it with {var.dtype}(...)")
        return value
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"input %{var.name} must be a tensor or array, got {type(value).__name__}: {error}"
        raise _error(block, what, "convert it with torch.as_tensor") from None
    if tensor.dtype != dtype_of(var.type) or tensor.dim() != len(var.shape):
        what = f"input %{var.name} must be {var.type}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        raise _error(block, what, f"convert it: .to(torch.{var.dtype}), and {len(var.shape)} dimensions")
    return tensor.to(device).contiguous()  # as it was captured: a view of it may not fit other strides


def _error(block: Block | None, message: str, help: str) -> GraphftError:
    return ProgramError(message, block=block, rule="feed", help=help)
