"""What is fed to a program, checked before anything runs."""

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
    """`feed` as tensors on `device`, if it is just what `block` reads: all of `needed`, and inputs only.

    Raises ProgramError[feed] for missing and unknown names, dtypes, ranks and sizes that differ from the program's,
    one dimension with two sizes, and sizes for which the program was not captured.
    """
    program = block.program
    inputs = {v.name: v for v in program.of_kind(Kind.INPUT)}
    unknown = [n for n in feed if n not in inputs]
    if unknown:
        raise _error(
            block,
            f"'{unknown[0]}' is fed, but is no input of program '{program.name}'",
            f"its inputs are {', '.join(inputs) or 'none'}",
        )
    missing = [n for n in needed if n not in feed]
    if missing:
        raise _error(
            block, f"input %{missing[0]} ({inputs[missing[0]].type}) is not fed", f"give feed={{{missing[0]!r}: ...}}"
        )
    values = {n: _value(block, inputs[n], value, device) for n, value in feed.items()}
    check_dims(program, {n: v for n, v in values.items() if isinstance(v, torch.Tensor)})
    return values


def needed_inputs(block: Block) -> list[str]:
    """Names of the inputs that the block reads before it writes them."""
    written: set[str] = set()
    needed: dict[str, None] = {}
    for op in block.ops:
        for name in op.reads:
            var = block.program.variables.get(name)
            if var is not None and var.kind is Kind.INPUT and name not in written:
                needed[name] = None
        written.update(op.writes)
    return list(needed)


def check_dims(program: Program, values: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of the named dimensions. Raises ProgramError[feed] when they contradict each other or the program."""
    dims: dict[str, int] = {}
    where: dict[str, str] = {}
    for name, value in values.items():
        for expected, size in zip(program.variables[name].shape, value.shape, strict=True):
            if isinstance(expected, str) and names_in(expected) == {expected}:
                if dims.setdefault(expected, size) != size:
                    raise _error(
                        None,
                        f"dimension {expected} is {dims[expected]} in %{where[expected]}, but {size} in %{name}",
                        "feed inputs of one batch",
                    )
                where.setdefault(expected, name)
    for name, value in values.items():
        shape = program.variables[name].shape
        for axis, (expected, size) in enumerate(zip(shape, value.shape, strict=True)):
            if isinstance(expected, int) or names_in(expected) <= dims.keys():
                wanted = evaluate(expected, dims)
                if wanted != size:
                    raise _error(
                        None,
                        f"input %{name} must be {program.variables[name].type}, got size {size} in dimension {axis}",
                        f"make it {wanted}",
                    )
    for condition, loc in program.attrs.get("assume", ()):
        if names_in(condition) <= dims.keys() and not evaluate(condition, dims):
            sizes = ", ".join(f"{n} = {dims[n]}" for n in sorted(names_in(condition)))
            raise _error(
                None,
                f"program '{program.name}' was captured for {condition} only ({loc} decides on it), got {sizes}",
                "feed another size, or capture a program for this one",
            )
    return dims


def _value(block: Block, var: Variable, value: Any, device: str | torch.device) -> Any:
    if not var.type.is_tensor:
        if type(value).__name__ != var.dtype and var.dtype in ("int", "float", "bool"):
            raise _error(
                block,
                f"input %{var.name} must be a Python {var.dtype}, got {type(value).__name__}",
                f"convert it with {var.dtype}(...)",
            )
        return value
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _error(
            block,
            f"input %{var.name} must be a tensor or array, got {type(value).__name__}: {error}",
            "convert it with torch.as_tensor",
        ) from None
    if tensor.dtype != dtype_of(var.type):
        raise _error(
            block,
            f"input %{var.name} must be {var.type}, got {str(tensor.dtype).removeprefix('torch.')}",
            f"convert it with .to(torch.{var.dtype})",
        )
    if tensor.dim() != len(var.shape):
        raise _error(
            block,
            f"input %{var.name} must be {var.type}, got shape {tuple(tensor.shape)}",
            f"give it {len(var.shape)} dimensions",
        )
    return tensor.to(device).contiguous()  # as it was captured: a view of it may not fit other strides


def _error(block: Block | None, message: str, help: str) -> GraphftError:
    return ProgramError(message, block=block, rule="feed", help=help)
