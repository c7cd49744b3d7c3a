"""Arithmetic on the integers, floats and truth values of a step (sizes, mostly): `prim.mul(%batch, 2)`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphft.errors import ProgramError
from graphft.ir import Arg, Block, Dim, Operator, Ref, Type, registry
from graphft.ir.registry import OpDef, Slot

KERNELS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": operator.abs,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and_": operator.and_,
    "or_": operator.or_,
    "sym_max": torch.sym_max,
    "sym_min": torch.sym_min,
    "sym_not": torch.sym_not,
    "sym_float": torch.sym_float,
    "sym_int": torch.sym_int,
    "sym_sum": torch.sym_sum,
    "sym_sqrt": torch._sym_sqrt,  # type: ignore[attr-defined]
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
}
_INTS = frozenset({"floor", "ceil", "trunc", "sym_int", "sym_sum"})
_FLOATS = frozenset({"truediv", "sym_float", "sym_sqrt"})
_BOOLS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "sym_not"})
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
    types = [_scalar(a, op, block) for a in _flat(op.args)]
    if op.attrs or not types:
        raise ProgramError(
            f"{op.type} takes operands only", block=block, rule="operands", help=f"write {op.type}(a, b)"
        )
    if short in _BOOLS:
        return (Type("bool"),)
    if short in _FLOATS or (short not in _INTS and "float" in types):
        return (Type("float"),)
    return (Type("int"),)


def _flat(args: tuple[Arg, ...]) -> list[Arg]:
    return [x for a in args for x in (a if isinstance(a, tuple) else (a,))]


def _scalar(arg: Arg, op: Operator, block: Block) -> str:
    type = block.program.variables[arg.name].type if isinstance(arg, Ref) else None
    found = type.dtype if type is not None and not type.is_tensor else builtin_name(arg) if type is None else ""
    if found not in ("int", "float", "bool"):
        raise ProgramError(
            f"{op.type} takes scalars, got {type or arg}",
            block=block,
            rule="operand-type",
            help="tensors are for aten ops, such as aten.mul.Tensor",
        )
    return found


def builtin_name(value: Any) -> str:
    """`int`, `float` or `bool`, or another name."""
    return type(value).__name__


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


registry.family("prim", define)
