"""Arithmetic on the integers, floats and truth values of a step (sizes, mostly): `prim.mul(%batch, 2)`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphft.errors import ProgramError
from graphft.ir import Arg, Block, Dim, Operator, Ref, Type
from graphft.ir.registry import OpDef, Slot

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "abs")
_SYMBOLIC = ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_sum")
KERNELS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_ARITHMETIC, *_COMPARISONS)},
    **{name: getattr(torch, name) for name in _SYMBOLIC},
    "sym_sqrt": torch._sym_sqrt,  # type: ignore[attr-defined]
    **{name: getattr(math, name) for name in ("floor", "ceil", "trunc")},
    "round": round,
}
_INTS = frozenset({"floor", "ceil", "trunc", "sym_int", "sym_sum"})
_FLOATS = frozenset({"truediv", "sym_float", "sym_sqrt"})
_BOOLS = frozenset({*_COMPARISONS, "sym_not"})
_TEXT = {
    "add": "({}) + ({})",
    "sub": "({}) - ({})",
    "mul": "({}) * ({})",
    "floordiv": "({}) // ({})",
    "mod": "({}) % ({})",
    "pow": "({}) ** ({})",
    "neg": "-({})",
    "sym_max": "Max({}, {})",
    "sym_min": "Min({}, {})",
    "sym_int": "{}",
    "trunc": "{}",
    "floor": "{}",
}
NAMES = {kernel: name for name, kernel in KERNELS.items()}
"""The op of a Python function, for capture."""


def define(name: str) -> OpDef | None:
    """The definition of `prim.<function>`, or None."""
    short = name.removeprefix("prim.")
    kernel = KERNELS.get(short)
    if kernel is None:
        return None
    return OpDef(
        name,
        kernel,
        (Slot("values", variadic=True),),
        (),
        functools.partial(_infer, short),
        doc=f"Python's `{short}` on scalars.",
        family="prim",
        extra={"own_arguments": True, "context_free": True},
    )


def _infer(short: str, op: Operator, block: Block) -> Sequence[Type]:
    types = [_type(x, block) for a in op.args for x in (a if isinstance(a, tuple) else (a,))]
    if op.attrs or not types or not {"int", "float", "bool"}.issuperset(types):
        raise ProgramError(
            f"{op.type} takes scalars and no attributes, got ({', '.join(types)})",
            block=block,
            rule="operands",
            help="tensors are for aten ops, such as aten.mul.Tensor",
        )
    if short in _BOOLS:
        return (Type("bool"),)
    return (Type("float" if short in _FLOATS or (short not in _INTS and "float" in types) else "int"),)


def _type(arg: Arg, block: Block) -> str:
    return str(block.program.variables[arg.name].type) if isinstance(arg, Ref) else type(arg).__name__


def dim_of(name: str, block: Block) -> Dim:
    """The value of integer variable `name`, as an expression over dimensions: what the ops that made it say.

    An integer that no op of the block makes stands for itself, under its own name.
    """
    producer = next((op for op in block.ops if name in op.outputs), None)
    if producer is None:
        return name
    short, args = producer.type.partition(".")[2], producer.args
    if short in ("sym_size.int", "sym_numel") and isinstance(args[0], Ref):
        shape = block.program.variables[args[0].name].shape
        if short == "sym_size.int":
            return shape[args[1]]
        return " * ".join(f"({d})" for d in shape) or 1
    if short in _TEXT and producer.type.startswith("prim."):
        return _TEXT[short].format(*(dim_of(a.name, block) if isinstance(a, Ref) else a for a in args))
    return name
