"""What a capture took for granted about sizes, and errors of a capture with the user's line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sympy
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphft.errors import GraphftError, UsageError
from graphft.locations import TORCH, error_line
from graphft.symbolic import Symbols

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
)
"""Of torch's errors when two operands differ in dtype."""
ONE_DTYPE = (
    "give model and inputs one dtype: model.float(); or declare an input with the model's, "
    "'x': ((None, 4), next(model.parameters()).dtype)"
)


WITHOUT_CAPTURE = "graphft.build(..., capture=False) trains the module as it is, in one op"
"""The way out for what cannot be captured."""


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
        where = f"{line}: " if line else ""
        text = symbols.rename(str(error).strip() or type(error).__name__).split("\n\n", 1)[0]
        if isinstance(error, _DATA_DEPENDENT):
            raise GraphftError(
                f"{where}the code needs the value of a tensor, which a captured program has no place for ({text})",
                rule="capture",
                help="replace .item(), .tolist(), bool(tensor), and `if`s on tensors by torch.where "
                "or other tensor operations",
            ) from error
        if isinstance(error, (DynamicOutputShapeException, UnsupportedOperatorException)):
            raise GraphftError(
                f"{where}{text} gives a result whose shape depends on values",
                rule="capture",
                help="use an operation with a fixed result shape (a mask instead of indexing by it, for one)",
            ) from error
        if ".numpy() is not supported" in text:
            raise UsageError(
                f"{where}the code makes a NumPy array of a tensor, which has no value while it is captured",
                rule="capture",
                help="compute it with torch's functions: a metric of scikit-learn's over all records is a reducer of "
                "torch's functions in Validation(reduce=...), or for on_validation and predict to compute",
            ) from error
        if "__format__" in text:
            raise UsageError(
                f"{where}the code formats the value of a tensor, which it does not have while it is captured ({text})",
                rule="capture",
                help="leave it out; to see the value of each step, return it as a metric: return loss, {'name': value}",
            ) from error
        of_torch = isinstance(error, RuntimeError)  # not what a model's own code raises
        dims = ", ".join(f"{n} (here {d.node.hint})" for n, d in symbols.dims.items())
        raise GraphftError(
            f"{where}{type(error).__name__}: {text}",
            rule="capture",
            help=INTEGERS
            if any(words in text for words in _WANTS_INTEGERS)
            else ONE_DTYPE
            if of_torch and any(words in text for words in _WANTS_ONE_DTYPE)
            else f"the model runs with the named dimensions {dims or '(none)'}; inputs that must agree in a size "
            "need the same name for it, and what the code cannot vary needs a number",
        ) from error


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
                "number of a size there (x.shape[0] instead of len(x), for one)",
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
