"""Dimensions and literals as they stand in a program, and what they are in torch."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from graphft.errors import GraphftError
from graphft.ir import Arg, Dim, Sym, Type

DEVICE = Sym("@device")
"""The literal that stands for the role's device."""

_ARITHMETIC = {"Add": "add", "Sub": "sub", "Mult": "mul", "FloorDiv": "floordiv", "Mod": "mod", "Div": "truediv"}
_COMPARISONS = {"Eq": "eq", "NotEq": "ne", "Lt": "lt", "LtE": "le", "Gt": "gt", "GtE": "ge"}
_OPERATORS = _ARITHMETIC | _COMPARISONS | {"Pow": "pow"}
_CALLS: dict[str, Callable[..., Any]] = {
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "FloatPow": operator.pow,
    "PowByNatural": operator.pow,
    "ToFloat": torch.sym_float,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "RoundToInt": round,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def evaluate(expression: Dim, dims: dict[str, Any]) -> Any:
    """The value of a dimension expression (or of a condition on dimensions), given the named dimensions' values.

    Raises GraphftError when it is not an expression of that kind, or names a dimension that `dims` lacks.
    """
    if isinstance(expression, int):
        return expression
    try:
        return _evaluate(ast.parse(expression, mode="eval").body, dims)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError) as error:
        raise GraphftError(
            f"cannot evaluate dimension {expression!r}: {error}",
            rule="dimension",
            help="a dimension is a number or an expression over names, such as 2*batch",
        ) from None


def _evaluate(node: ast.expr, dims: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return dims[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate(inner, dims)
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if type(op).__name__ in _OPERATORS:
            apply = getattr(operator, _OPERATORS[type(op).__name__])
            return apply(_evaluate(left, dims), _evaluate(right, dims))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS:
            first, *others = (_evaluate(a, dims) for a in args)
            return functools.reduce(_CALLS[name], others, first) if others else _CALLS[name](first)
    raise TypeError(f"{ast.unparse(node)} is not supported")


def names_in(expression: Dim) -> set[str]:
    """The named dimensions in an expression."""
    if isinstance(expression, int):
        return set()
    if expression.isidentifier():
        return {expression}
    found = list(ast.walk(ast.parse(expression, mode="eval")))
    called = {n.func for n in found if isinstance(n, ast.Call)}
    return {n.id for n in found if isinstance(n, ast.Name) and n not in called}


def dtype_of(type: Type) -> torch.dtype:
    """The torch dtype of a tensor type. Raises GraphftError for an unknown name."""
    found = getattr(torch, type.dtype, None)
    if not isinstance(found, torch.dtype):
        raise GraphftError(f"torch has no dtype {type.dtype}", rule="dtype", help="use a name such as float32")
    return found


def literal(value: Any) -> Arg:
    """A torch literal as it stands in a program. Raises GraphftError for what cannot be written down."""
    if value is None or isinstance(value, (bool, int, float, str, Sym)):
        return value
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return Sym(str(value))
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, (list, tuple)):
        return tuple(map(literal, value))
    raise GraphftError(
        f"a {type(value).__name__} cannot be an operand: {value!r}",
        rule="literal",
        help="use numbers, strings, dtypes and devices; draw random numbers from torch's default generator",
    )


def resolve(value: Arg, device: str | torch.device) -> Any:
    """The inverse of `literal`; `@device` becomes `device`."""
    if isinstance(value, tuple):
        return [resolve(v, device) for v in value]
    if not isinstance(value, Sym):
        return value
    if value == DEVICE:
        return torch.device(device)
    found = getattr(torch, value.name.removeprefix("torch."), None) if value.name.startswith("torch.") else None
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise GraphftError(
            f"{value.name} is no literal that torch knows",
            rule="literal",
            help="write a dtype, layout or memory format, such as torch.float32, or @device",
        )
    return found
