"""Between a program's types and torch: named dimensions as symbolic integers, variables as fake tensors.

A `Symbols` is one world of named dimensions. It turns `float32[batch, 8]` into a tensor without data whose first
size is the symbol `batch`, and prints the sizes of whatever torch infers from it as expressions over the names.
"""

from __future__ import annotations

import ast
import logging
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from graphft.errors import GraphftError
from graphft.ir import Arg, Dim, Sym, Type
from graphft.locations import TRACED, line_of, user_line

DEVICE = Sym("@device")
"""The literal that stands for the role's device."""

SCALARS: dict[type, str] = {bool: "bool", SymBool: "bool", int: "int", SymInt: "int", float: "float",
                            SymFloat: "float"}

UNKNOWN = sympy.Symbol("unknown", integer=True, positive=True)
"""Name of every size that depends on values, not on sizes: of `x[mask]`, for one."""

_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__")
_HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.Pow: operator.pow,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "Mod": operator.mod, "PythonMod": operator.mod, "FloorDiv": operator.floordiv,
    "Max": torch.sym_max, "Min": torch.sym_min,
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
        raise GraphftError(f"cannot evaluate dimension {expression!r}: {error}", rule="dimension",
                           help="a dimension is a number or an expression over names, such as 2*batch") from None


def _evaluate(node: ast.expr, dims: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return dims[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate(inner, dims)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_evaluate(left, dims), _evaluate(right, dims))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_evaluate(left, dims), _evaluate(right, dims))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS:
            first, *rest = (_evaluate(a, dims) for a in args)
            for value in rest:
                first = _CALLS[name](first, value)
            return first
    raise TypeError(f"{ast.unparse(node)} is not supported")


def names_in(expression: Dim) -> set[str]:
    """The named dimensions in an expression."""
    if isinstance(expression, int):
        return set()
    if expression.isidentifier():
        return {expression}
    tree = ast.parse(expression, mode="eval")
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - set(_CALLS)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from logging a traceback for an error that we raise with a better message."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(frozen=True, slots=True)
class Decision:
    """Python code asked for the value of a size expression, and went on with `result`."""

    expression: Any
    result: Any
    file: str
    """The Python file that asked."""
    loc: str
    """The user's line, or the one in `file` if there is none."""


class _Env(ShapeEnv):
    """Notes what Python code decides on sizes. What torch's kernels decide inside is about strides and errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.decisions: list[Decision] = []

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        expression = sym_node.expr  # before a guard replaces its symbols
        result = super().evaluate_sym_node(sym_node, *args, **kwargs)
        frame: FrameType | None = sys._getframe(1)
        for _ in range(6):
            if frame is not None and frame.f_code.co_name in _CONVERSIONS and frame.f_back is not None:
                if frame.f_code.co_filename == torch.__file__:
                    self._note(expression, result, frame.f_back)
                break
            frame = frame.f_back if frame is not None else None
        return result

    def _note(self, expression: Any, result: Any, frame: FrameType) -> None:
        code = frame.f_code
        loc = user_line(frame, until=TRACED) or line_of(code.co_filename, frame.f_lineno, code.co_name)
        self.decisions.append(Decision(expression, result, code.co_filename, loc))


class Symbols:
    """Named dimensions, and tensors without data whose sizes are made of them."""

    def __init__(self, static: Iterable[int] = ()) -> None:
        """`static` are sizes that occur in the program: no dimension's example size is one of them."""
        self.env = _Env(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.dims: dict[str, SymInt] = {}
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        avoid = set(static)
        self._hints = [h for h in _HINTS if h not in avoid] or [61]

    def dim(self, expression: Dim) -> int | SymInt:
        """The size that an expression stands for. New names are new symbols."""
        for name in sorted(names_in(expression)):
            if name not in self.dims:
                self.dims[name] = self._new(name)
        return evaluate(expression, self.dims)

    def _new(self, name: str) -> SymInt:
        n = len(self.dims)
        hint = self._hints[n] if n < len(self._hints) else self._hints[-1] + 2 * n
        source = ConstantSource(name)
        symbol = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC,
                                        do_not_specialize_zero_one=True)
        self._names[symbol] = sympy.Symbol(name, integer=True, positive=True)
        size = self.env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(size, SymInt)
        return size

    def tensor(self, type: Type) -> Tensor:
        """A contiguous tensor of this type without data."""
        size = [self.dim(d) for d in type.shape or ()]
        with self.mode:
            return torch.empty(size, dtype=dtype_of(type))

    def expression(self, value: int | SymInt | SymBool) -> Dim:
        """A size as it prints: a number, or an expression over the names."""
        if isinstance(value, int):
            return value
        return self.named(value.node.expr)

    def named(self, expr: Any) -> Dim:
        """A sympy expression over this world's symbols as it prints."""
        expr = sympy.sympify(self.env.simplify(expr)).xreplace(self._names)
        expr = expr.xreplace({s: UNKNOWN for s in expr.free_symbols if s not in self._names.values()})
        return int(expr) if expr.is_Integer else str(expr)

    def named_condition(self, expr: Any) -> Any:
        """A sympy expression in terms of the names, simplified by nothing but that they are positive."""
        return sympy.sympify(expr).xreplace(self._names)

    def fixed(self) -> dict[str, Dim]:
        """Named dimensions that torch has found to be equal to a number, or to another dimension."""
        found = {str(name): self.named(symbol) for symbol, name in self._names.items()}
        return {name: value for name, value in found.items() if value != name}

    def rename(self, text: str) -> str:
        """Torch's text with the dimensions' names in the place of torch's own symbols."""
        for symbol, name in self._names.items():
            text = re.sub(rf"\b{re.escape(str(symbol))}\b", str(name), text)
        return text

    def type_of(self, value: Any) -> Type:
        """The type of what torch gave: a tensor, or an integer, float or truth value."""
        if isinstance(value, Tensor):
            return Type(str(value.dtype).removeprefix("torch."), tuple(self.expression(d) for d in value.shape))
        if type(value) not in SCALARS:
            raise GraphftError(f"a value of Python type {type(value).__name__} has no type in a program",
                               rule="type", help="operators give tensors, ints, floats and truth values")
        return Type(SCALARS[type(value)])


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
    raise GraphftError(f"a {type(value).__name__} cannot be an operand: {value!r}", rule="literal",
                       help="use numbers, strings, dtypes and devices; draw random numbers from torch's default "
                            "generator")


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
        raise GraphftError(f"{value.name} is no literal that torch knows", rule="literal",
                           help="write a dtype, layout or memory format, such as torch.float32, or @device")
    return found
