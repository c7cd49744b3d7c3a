"""Torch's own operators: `aten.addmm`, `aten.add.Tensor`, and those of any other torch namespace.

One definition serves them all, made from torch's operator schema: operands and attributes are the schema's
positional and keyword-only arguments, the kernel is torch's, and result types come from running it on tensors
without data. `aten.NAME` is the overload `default`, `aten.NAME.OVERLOAD` any other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from graphft.errors import ProgramError
from graphft.ir import Arg, Block, Operator, Ref, Sym, Type, registry
from graphft.ir.literals import literal, resolve
from graphft.ir.registry import Attr, OpDef, Slot
from graphft.ops.prim import dim_of

HIDDEN_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm": ("running_mean", "running_var"),
    "aten::instance_norm": ("running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that a kernel changes in place though its schema does not say so (in training mode)."""


def overload_of(name: str) -> OpOverload | None:
    """Torch's operator of this name, or None."""
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    found = getattr(packet, overload or "default", None) if isinstance(packet, OpOverloadPacket) else None
    return found if isinstance(found, OpOverload) else None


def define(name: str) -> OpDef | None:
    """The definition of torch operator `name`, or None."""
    overload = overload_of(name)
    if overload is None or (name.endswith(".default") and name.count(".") == 2):
        return None
    schema = overload._schema
    slots = tuple(Slot(a.name) for a in schema.arguments if not a.kwarg_only)
    attrs = tuple(
        Attr(a.name, Any, literal(a.default_value) if a.has_default_value() else inspect.Parameter.empty)
        for a in schema.arguments
        if a.kwarg_only
    )
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return OpDef(
        name,
        overload,
        slots,
        attrs,
        functools.partial(_infer, overload),
        writes=writes + HIDDEN_WRITES.get(schema.name, ()),
        effect=torch.Tag.nondeterministic_seeded in overload.tags or (not schema.returns and not writes),
        doc=f"Torch's `{schema}`.",
        family=name.partition(".")[0],
        extra={"own_arguments": True, "context_free": True, **_result_lists(overload)},
    )


def _result_lists(overload: OpOverload) -> dict[str, Any]:
    """Which results are lists of tensors (of split, unbind ...), where some are: a program holds their elements."""
    lists = tuple(str(r.type).startswith("List[") for r in overload._schema.returns)
    return {"result_lists": lists} if any(lists) else {}


# -- inference ------------------------------------------------------------------------------------------------


class _TorchError(Exception):
    """What torch said, with the dimensions' names in it."""


@dataclass(frozen=True, slots=True)
class _Dim:
    """An integer operand whose value is this expression over named dimensions."""

    expression: int | str


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator applied to types and literals. Compared by text: 1, 1.0 and true are equal in Python."""

    overload: OpOverload = field(compare=False)
    args: tuple[Any, ...] = field(compare=False)
    kwargs: dict[str, Any] = field(compare=False)
    text: str


def _infer(overload: OpOverload, op: Operator, block: Block) -> Sequence[Type]:
    def operand(ref: Ref) -> Any:
        type = block.program.variables[ref.name].type
        return _Dim(dim_of(ref.name, block)) if type.dtype == "int" and not type.is_tensor else type

    args = _map(op.args, operand)
    kwargs = {k: _map(v, operand) for k, v in op.attrs.items()}
    _check_arguments(overload, op, block, args, kwargs)
    try:
        return _result_types(_Call(overload, args, kwargs, f"{op.type} {args!r} {sorted(kwargs.items())!r}"))
    except _TorchError as error:
        first = str(error).strip().split("\n", 1)[0]
        given = ", ".join(_show(a) for a in (*args, *kwargs.values()))
        raise ProgramError(
            f"{op.type} does not take ({given}): {first}",
            block=block,
            index=_index(op, block),
            rule="shape",
            help=f"its schema is {overload._schema}",
        ) from error


def _index(op: Operator, block: Block) -> int | None:
    return next((i for i, o in enumerate(block.ops) if o is op), None)


def _map(arg: Arg, fn: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(_map(a, fn) for a in arg)
    return fn(arg) if isinstance(arg, Ref) else arg


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_show, value))})"
    return str(value.expression) if isinstance(value, _Dim) else str(value)


@functools.lru_cache(maxsize=8192)
def _result_types(call: _Call) -> tuple[Type, ...]:
    # Imported here: inference needs parts of torch that take a second to load, and roles do not infer.
    from torch._dispatch.python import enable_python_dispatcher

    from graphft.ir.symbolic import Symbols, quiet

    symbols = Symbols(_sizes((*call.args, *call.kwargs.values())))

    def value(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return [value(a) for a in arg]
        if isinstance(arg, _Dim):
            return symbols.dim(arg.expression)
        if isinstance(arg, Type):
            return symbols.tensor(arg) if arg.is_tensor else 1.0 if arg.dtype == "float" else True
        return resolve(arg, "cpu")

    args, kwargs = [value(a) for a in call.args], {k: value(v) for k, v in call.kwargs.items()}
    try:
        # the Python dispatcher, as in a trace: some of torch's C++ code takes a size for a number
        with symbols.mode, enable_python_dispatcher(), torch.no_grad(), quiet():
            results = call.overload(*args, **kwargs)
    except Exception as error:
        raise _TorchError(symbols.rename(str(error))) from error
    return tuple(Type("none") if r is None else symbols.type_of(r) for r in flat_results(results))


def _sizes(args: Any) -> Iterator[int]:
    for a in args:
        if isinstance(a, tuple):
            yield from _sizes(a)
        elif isinstance(a, Type):
            yield from (d for d in a.shape or () if isinstance(d, int))


def flat_results(results: Any) -> list[Any]:
    """An operator's results one after the other, lists of tensors included."""
    if results is None:
        return []
    if not isinstance(results, (tuple, list)):
        return [results]
    return [r for item in results for r in (item if isinstance(item, (tuple, list)) else (item,))]


# -- arguments ------------------------------------------------------------------------------------------------

_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "number": (bool, int, float),
    "str": (str,),
    "ScalarType": (Sym,),
    "Layout": (Sym,),
    "MemoryFormat": (Sym,),
    "Device": (Sym,),
    "Tensor": (bool, int, float),
}
_OPERANDS = {
    "Tensor": ("int", "float", "bool"),
    "int": ("int",),
    "number": ("int", "float", "bool"),
    "float": ("float", "int"),
    "bool": ("bool",),
}


def _check_arguments(
    overload: OpOverload, op: Operator, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Count, names and Python types of `op`'s arguments against the schema. Shapes are torch's to check."""
    schema = overload._schema

    def fail(rule: str, message: str) -> ProgramError:
        others = [
            f"{op.type.rsplit('.', 1)[0] if overload._overloadname != 'default' else op.type}.{o}"
            for o in overload.overloadpacket.overloads()
            if o not in ("default", overload._overloadname)
        ]
        return ProgramError(
            f"{op.type} {message}",
            block=block,
            index=_index(op, block),
            rule=rule,
            help=f"its schema is {schema}" + (f"; other overloads are {', '.join(others)}" if others else ""),
        )

    positional = [a for a in schema.arguments if not a.kwarg_only]
    if len(args) > len(positional):
        raise fail("operands", f"takes at most {len(positional)} operands, got {len(args)}")
    given = {a.name: value for a, value in zip(positional, args, strict=False)}
    known = {a.name: a for a in schema.arguments}
    for name, value in kwargs.items():
        if name not in known:
            raise fail("attribute", f"has no attribute {name}")
        if name in given:
            raise fail("attribute", f"is given {name} twice: as an operand and as an attribute")
        given[name] = value
    missing = [a.name for a in schema.arguments if a.name not in given and not a.has_default_value()]
    if missing:
        raise fail("operands", f"needs {', '.join(missing)}")
    for name, value in given.items():
        expected = str(known[name].real_type)
        if not _conforms(value, expected):
            kind = "attribute-type" if name in kwargs else "operand-type"
            raise fail(kind, f"needs {name} of type {expected}, got {_show(value)}")


def _conforms(value: Any, expected: str) -> bool:
    if expected.startswith("Optional["):
        return value is None or _conforms(value, expected[9:-1])
    if expected.startswith("List["):
        inner = expected[5:-1]
        return (
            all(_conforms(v, inner) for v in value)
            if isinstance(value, tuple)
            else inner != "Tensor" and _conforms(value, inner)
        )
    if isinstance(value, _Dim):
        return expected in ("int", "number", "float", "Tensor")
    if isinstance(value, Type):
        return expected == "Tensor" if value.is_tensor else value.dtype in _OPERANDS.get(expected, ())
    if expected not in _SCALARS:
        return value is None or isinstance(value, Tensor)
    return isinstance(value, _SCALARS[expected]) and not (isinstance(value, bool) and expected in ("int", "float"))


registry.family("*", define)
