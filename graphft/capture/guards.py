"""What a capture took for granted about sizes, and errors of a capture with the user's line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import sympy
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from graphft.capture.locations import TORCH, error_line
from graphft.errors import GraphftError, UsageError
from graphft.ir.symbolic import Symbols

_META = tuple(
    TORCH + d
    for d in (
        "_subclasses",
        "_meta_registrations",
        "_prims",
        "_refs",
        "_decomp",
        "fx",
        "_inductor",
        "_library",
        "_higher_order",
    )
)
"""Torch's code for tensors without data: what it decides on sizes is about strides and errors, not about values."""

_DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)

_WANTS_INTEGERS = (
    "Expected dtype int32/int64 for index",
    "scalar types: Long, Int",
    "expected scalar type Long",
    "tensors used as indices must be long",
    "should be Long but got Int",
    "expected indices to be long or int",
)
"""Of torch's errors when class labels, or indices, are floats."""
INTEGERS = "class labels and indices are integers: declare such an input with its dtype, 'y': ((None,), torch.int64)"
_WANTS_ONE_DTYPE = (
    "same dtype",
    "same type",
    "type (",
    "dtypes must be the same",
    "expected dtype",
    "self.dtype to be equal to src.dtype",
    "Type promoting not supported",
    "Found dtype",
    "expected scalar type",
    "dtypes match",
    "same scalar type",
)
"""Of torch's errors when two operands differ in dtype."""
ONE_DTYPE = (
    "give model and inputs one dtype: model.float(); or declare an input with the model's, "
    "'x': ((None, 4), next(model.parameters()).dtype)"
)


WITHOUT_CAPTURE = "graphft.build(..., capture=False) trains the module as it is, in one op"
"""The way out for what cannot be captured."""
SCRIPTED = f"give the part as it was before torch.jit.script; or {WITHOUT_CAPTURE}"


def dtype_help(text: str) -> str:
    """The remedy for one of torch's errors about dtypes; "" for any other."""
    if any(words in text for words in _WANTS_INTEGERS):
        return INTEGERS
    return ONE_DTYPE if any(words in text for words in _WANTS_ONE_DTYPE) else ""


@contextmanager
def captured(symbols: Symbols) -> Iterator[None]:
    """Turns whatever a trace raises into GraphftError[capture] with the user's line and the remedy."""
    try:
        yield
    except GraphftError as error:
        kind = UsageError if isinstance(error, UsageError) else GraphftError
        raise kind(symbols.rename(error.message), rule=error.rule, help=error.help) from error.__cause__
    except Exception as error:
        line = error_line(error)
        text = symbols.rename(str(error).strip() or type(error).__name__).split("\n\n", 1)[0]
        what, help = _reason(error, text) or (
            f"{type(error).__name__}: {text}",
            (isinstance(error, RuntimeError) and dtype_help(text))
            or "the model runs with the named dimensions "
            + (", ".join(f"{n} (here {d.node.hint})" for n, d in symbols.dims.items()) or "(none)")
            + "; inputs that must agree in a size need the same name for it, and what the code cannot vary needs a "
            f"number; {WITHOUT_CAPTURE}",
        )
        raise GraphftError(f"{line}{': ' * bool(line)}{what}", rule="capture", help=help) from error


def _reason(error: Exception, text: str) -> tuple[str, str] | None:
    """Returns what the code does that a trace cannot follow, and the remedy; None if that is not known."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packs = any(frame.f_code.co_name in ("pack_padded_sequence", "pack_sequence") for frame in frames)
    if packs or any(isinstance(v, PackedSequence) for frame in frames for v in frame.f_locals.values()):
        return (
            "packed sequences are laid out by the values of their lengths, which a captured program does not have",
            f"mask what lies behind a sequence's end; or {WITHOUT_CAPTURE}",
        )
    if "TorchScript" in text or "torch.jit" in text:
        return f"a part of torch.jit cannot be traced ({text.splitlines()[-1]})", SCRIPTED
    if isinstance(error, _DATA_DEPENDENT):
        return (
            "the code needs the value of a tensor, which a captured program has no place for",
            f"replace .item(), .tolist(), bool(tensor), and `if`s on tensors by torch.where; or {WITHOUT_CAPTURE}",
        )
    if isinstance(error, (DynamicOutputShapeException, UnsupportedOperatorException)):
        return (
            f"{text} gives a result whose shape depends on values",
            f"use an operation with a fixed result shape (a mask, not indexing by it); or {WITHOUT_CAPTURE}",
        )
    if ".numpy() is not supported" in text or "__format__" in text:
        return (
            "the code makes a number, a text or a NumPy array of a tensor, which has no value while it is captured",
            f"compute with torch; what is to be seen is a metric: return loss, {{'name': value}}; or {WITHOUT_CAPTURE}",
        )
    return None


def assumptions(symbols: Symbols) -> tuple[tuple[str, str], ...]:
    """Conditions on named dimensions under which the captured program holds, each with the line that decides on it.

    Raises GraphftError[dimension] if the code fixed a named dimension, or made two of them equal.
    """
    found: dict[str, str] = {}
    for name, value, line in symbols.fixed():
        line = line or "the model"
        if isinstance(value, int):  # the example size, which says nothing to the user
            raise GraphftError(
                f"dimension {name} must vary, but {line} makes a number of it",
                rule="dimension",
                help=f"give {name} as a number in inputs (recurrent networks need their length so), or do not make a "
                f"number of a size there (x.shape[0] instead of len(x), for one); or {WITHOUT_CAPTURE}",
            )
        raise GraphftError(
            f"dimension {name} must vary, but {line} makes it equal to {value}",
            rule="dimension",
            help=f"give both sizes the same name in inputs, if they always agree: {value}",
        )
    decisions = [d for d in symbols.env.decisions if not d.file.startswith(_META)]
    for decision in decisions:
        condition = symbols.named_condition(decision.expression)
        if isinstance(condition, sympy.Rel):
            if not decision.result:
                condition = sympy.Not(condition)
            if condition not in (sympy.true, sympy.false):
                found.setdefault(f"{condition.lhs} {condition.rel_op} {condition.rhs}", decision.loc)
    return tuple(found.items())
