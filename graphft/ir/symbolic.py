"""Between a program's types and torch: named dimensions as symbolic integers, variables as fake tensors."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_impls import _is_op_registered_to_fake_rule, register_op_impl
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, _constrain_range_for_size

from graphft.capture.locations import TRACED, line_of, user_line
from graphft.errors import GraphftError
from graphft.ir import Dim, Type
from graphft.ir.literals import dtype_of, evaluate, names_in

SCALARS: dict[type, str] = {bool: "bool", SymBool: "bool", int: "int", SymInt: "int", float: "float", SymFloat: "float"}

UNKNOWN = sympy.Symbol("unknown", integer=True, positive=True)
"""Name of every size that depends on values, not on sizes: of `x[mask]`, for one."""

_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__")
_HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from logging a traceback for an error that we raise with a better message."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def with_exact_floats(expr: Any) -> Any:
    """Returns an expression that prints its floats as Python does: sympy prints 15 digits, which are another float."""
    return expr.xreplace({f: sympy.Symbol(repr(float(f))) for f in expr.atoms(sympy.Float)})


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
        self.fixed_at: dict[sympy.Symbol, str] = {}
        """The user's line at which torch found a size to be equal to a number, or to another size."""

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        expression = sym_node.expr  # before a guard replaces its symbols
        result = super().evaluate_sym_node(sym_node, *args, **kwargs)
        for symbol in self.replacements.keys() - self.fixed_at.keys():
            self.fixed_at[symbol] = user_line(sys._getframe(1), until=TRACED)
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
        _register_missing()
        self.env = _Env(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.dims: dict[str, SymInt] = {}
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        avoid = set(static)
        self._hints = [h for h in _HINTS if h not in avoid] or [61]

    def dim(self, expression: Dim) -> int | SymInt:
        """The size that an expression stands for. New names are new symbols."""
        for name in sorted(names_in(expression) - self.dims.keys()):
            n = len(self.dims)
            hint = self._hints[n] if n < len(self._hints) else self._hints[-1] + 2 * n
            source, dynamic = ConstantSource(name), DimDynamic.DYNAMIC
            symbol = self.env.create_symbol(hint, source, dynamic_dim=dynamic, do_not_specialize_zero_one=True)
            self._names[symbol] = sympy.Symbol(name, integer=True, positive=True)
            size = self.env.create_symintnode(symbol, hint=hint, source=source)
            assert isinstance(size, SymInt)
            self.dims[name] = size
        return evaluate(expression, self.dims)

    def tensor(self, type: Type) -> Tensor:
        """A contiguous tensor of this type without data."""
        size = [self.dim(d) for d in type.shape or ()]
        with self.mode:
            return torch.empty(size, dtype=dtype_of(type))

    def expression(self, value: int | SymInt | SymBool) -> Dim:
        """A size as it prints: a number, or an expression over the names."""
        return value if isinstance(value, int) else self._named(value.node.expr)

    def _named(self, expr: Any) -> Dim:
        expr = sympy.sympify(self.env.simplify(expr)).xreplace(self._names)
        expr = expr.xreplace({s: UNKNOWN for s in expr.free_symbols if s not in self._names.values()})
        return int(expr) if expr.is_Integer else str(with_exact_floats(expr))

    def named_condition(self, expr: Any) -> Any:
        """A sympy expression in terms of the names, simplified by nothing but that they are positive."""
        return sympy.sympify(expr).xreplace(self._names)

    def fixed(self) -> Iterator[tuple[str, Dim, str]]:
        """Named dimensions that torch has found to be equal to a number, or to another dimension; and where."""
        for symbol, name in self._names.items():
            value = self._named(symbol)
            if value != str(name):
                yield str(name), value, self.env.fixed_at.get(symbol, "")

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
            raise GraphftError(
                f"a value of Python type {type(value).__name__} has no type in a program",
                rule="type",
                help="operators give tensors, ints, floats and truth values",
            )
        return Type(SCALARS[type(value)])


# -- shapes of results that this torch cannot tell of tensors without data ------------------------------------------


def _ctc_loss(
    mode: FakeTensorMode, func: Any, log_probs: Tensor, targets: Tensor, *lengths_and_options: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """(loss of each sample, what the backward pass needs): the latter is as long as the longest target makes it."""
    if mode.shape_env is None:
        raise DynamicOutputShapeException(func)
    states = mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(states)
    time, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, time, states))


def _like_input(mode: FakeTensorMode, func: Any, grad: Tensor, input: Tensor, *others: Any, **options: Any) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _register_missing() -> None:
    """Registers the kernels above with torch, each once, but for those that torch has itself."""
    for name, overload, kernel in (
        ("_ctc_loss", "Tensor", _ctc_loss),
        ("_ctc_loss_backward", "Tensor", _like_input),
        ("multi_margin_loss_backward", "default", _like_input),
        ("multilabel_margin_loss_backward", "default", _like_input),
    ):
        found = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if found is not None and not _is_op_registered_to_fake_rule(found):
            register_op_impl(found)(kernel)
