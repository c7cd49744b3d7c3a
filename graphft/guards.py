"""What a capture took for granted about sizes, and errors of a capture with the user's line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import sympy
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphft.errors import GraphftError
from graphft.symbolic import Symbols
from graphft.tracing import error_line

_META = tuple(os.path.join(os.path.dirname(torch.__file__), d) for d in (
    "_subclasses", "_meta_registrations", "_prims", "_refs", "_decomp", "fx", "_inductor", "_library", "_higher_order"))
"""Torch's code for tensors without data: what it decides on sizes is about strides and errors, not about values."""

_DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)


@contextmanager
def captured(symbols: Symbols) -> Iterator[None]:
    """Turns whatever a trace raises into GraphftError[capture] with the user's line and the remedy."""
    try:
        yield
    except GraphftError:
        raise
    except Exception as error:
        line = error_line(error)
        where = f"{line}: " if line else ""
        text = symbols.rename(str(error).strip() or type(error).__name__).split("\n\n", 1)[0]
        if isinstance(error, _DATA_DEPENDENT):
            raise GraphftError(
                f"{where}the code needs the value of a tensor, which a captured program has no place for ({text})",
                rule="capture", help="replace .item(), .tolist(), bool(tensor), and `if`s on tensors by torch.where "
                                     "or other tensor operations") from error
        if isinstance(error, (DynamicOutputShapeException, UnsupportedOperatorException)):
            raise GraphftError(
                f"{where}{text} gives a result whose shape depends on values", rule="capture",
                help="use an operation with a fixed result shape (a mask instead of indexing by it, for one)"
            ) from error
        dims = ", ".join(f"{n} (here {d.node.hint})" for n, d in symbols.dims.items())
        raise GraphftError(
            f"{where}{type(error).__name__}: {text}", rule="capture",
            help=f"the model runs with the named dimensions {dims or '(none)'}; inputs that must agree in a size "
                 "need the same name for it, and what the code cannot vary needs a number") from error


def assumptions(symbols: Symbols) -> tuple[tuple[str, str], ...]:
    """Conditions on named dimensions under which the captured program holds, each with the line that decides on it.

    Raises GraphftError[dimension] if the code fixed a named dimension, or made two of them equal.
    """
    found: dict[str, str] = {}
    for guard in symbols.env.guards:
        frame = guard.sloc.framework_loc
        file = getattr(frame, "filename", "")
        line = f"{os.path.basename(file)}:{frame.lineno} in {frame.name}" if file else "the code"
        expr = symbols.condition(guard.expr)
        fixed = isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and (expr.rhs.is_Integer or expr.rhs.is_Symbol)
        if fixed:
            raise GraphftError(f"dimension {expr.lhs} must vary, but {line} makes it equal to {expr.rhs}",
                               rule="dimension", help=f"give it the size {expr.rhs} in inputs, or do not compare "
                                                      "or convert sizes there")
        if isinstance(expr, sympy.Rel) and not file.startswith(_META):
            found.setdefault(f"{expr.lhs} {expr.rel_op} {expr.rhs}", line)
    return tuple(found.items())
