"""The parts of a program: types, kinds of variables, operands and literals."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Dim = int | str
"""A dimension: a number, or an expression over named symbolic dimensions such as `batch` or `2*batch`."""


@dataclass(frozen=True, slots=True)
class Type:
    """The type of a variable. `shape` is None for what is not a tensor.

    Tensors: `Type("float32", ("batch", 8))`, printed `float32[batch, 8]`. Scalars of a step: `Type("int")`,
    `Type("float")`, `Type("bool")`. Handles that only our own ops read: `Type("chunk")`.
    """

    dtype: str
    shape: tuple[Dim, ...] | None = None

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None

    @property
    def numel(self) -> int | None:
        """Number of elements, or None when a dimension is symbolic or this is no tensor."""
        if self.shape is None or any(isinstance(d, str) for d in self.shape):
            return None
        n = 1
        for d in self.shape:
            n *= int(d)
        return n


class Kind(enum.Enum):
    """Says of a variable's value who owns it, and how it comes about."""

    INPUT = "input"  # fed at each step, or read by read_chunk
    PARAM = "param"  # trainable: has a gradient, is evolved by an optimizer; lives on pservers
    BUFFER = "buffer"  # evolves without gradient (batch-norm statistics); lives on pservers
    STATE = "state"  # optimizer state; lives where its parameter lives
    FROZEN = "frozen"  # in the model's state_dict, never changes (frozen parameters, constant buffers)
    CONST = "const"  # a constant that capture lifted out of the code; not in the state_dict
    TEMP = "temp"  # the result of an op; lives within one run of a block

    @property
    def persistent(self) -> bool:
        """Has a value before the first run, which `Program.values` holds."""
        return self in _PERSISTENT


_PERSISTENT = frozenset({Kind.PARAM, Kind.BUFFER, Kind.STATE, Kind.FROZEN, Kind.CONST})


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand: the variable of this name."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Sym:
    """A literal that is no Python literal: `torch.float32`, `torch.strided`, `@device` (the role's device)."""

    name: str

    def __str__(self) -> str:
        return self.name


Arg = Any
"""An operand or attribute value: Ref | Sym | None | bool | int | float | str | tuple of Arg."""


def same(a: Any, b: Any) -> bool:
    """Equality of Args or dicts of them: exact (1 is neither 1.0 nor true), and nan equals nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


GRAD = "@GRAD"
"""`grad_name(x)` is `x@GRAD`: the gradient of parameter x."""


def grad_name(name: str) -> str:
    return name + GRAD


def backup_name(name: str) -> str:
    """`x@BACKUP`: parameter x as it was when the gradient at hand was computed."""
    return f"{name}@BACKUP"


def refs(args: Any) -> Iterator[Ref]:
    """Every `Ref` in nested args, in order."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, (tuple, list)):
        for a in args:
            yield from refs(a)


def map_refs(args: Any, fn: Any) -> Any:
    """`args` with `fn(ref)` in the place of every `Ref`."""
    if isinstance(args, Ref):
        return fn(args)
    if isinstance(args, (tuple, list)):
        return tuple(map_refs(a, fn) for a in args)
    return args
