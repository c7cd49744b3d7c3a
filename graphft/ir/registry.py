"""Op definitions: one declaration per op holds its slots, attributes, inference, checks, kernel and docs.

    @op("sgd", writes=("param",))
    def sgd(ctx, param: Tensor, grad: Tensor, lr: Tensor, *, momentum: float = 0.0):
        '''One step of stochastic gradient descent ...'''

The function *is* the kernel. Its positional parameters after `ctx` are the op's operand slots (`*name` a variadic
one), its keyword-only parameters the attributes, its docstring is the op reference. A kernel with `**options` has the
attributes of a dataclass: `op(..., attrs=attributes_of(SGD))`. Families (`aten.*`, `prim.*`) have `define(name)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from graphft.errors import ProgramError
from graphft.ir.types import Ref, Type, refs, same

if TYPE_CHECKING:
    from graphft.ir import Block, Operator

Kernel = Callable[..., Any]
Infer = Callable[["Operator", "Block"], Sequence[Type]]
Check = Callable[["Operator", "Block"], None]


@dataclass(frozen=True, slots=True)
class Slot:
    """An operand position. A variadic slot takes the remaining operands.

    A slot annotated `Ref` in the kernel's signature is `by_name`: the kernel gets the `Ref`, not the value.
    """

    name: str
    variadic: bool = False
    by_name: bool = False


@dataclass(frozen=True, slots=True)
class Attr:
    """A keyword attribute; `default` is `inspect.Parameter.empty` where one must be given."""

    name: str
    type: Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class OpDef:
    """The definition of an op. `writes` names the slots (or all of a variadic slot) changed in place."""

    name: str
    kernel: Kernel
    slots: tuple[Slot, ...]
    attrs: tuple[Attr, ...]
    infer: Infer
    check: Check | None = None
    writes: tuple[str, ...] = ()
    effect: bool = False
    """Has an effect beyond its results and `writes` (sends, waits, etcd): never dead code, never reordered."""
    doc: str = ""
    family: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    results: tuple[Type, ...] | None = None
    """The result types where they are fixed, for the op reference; None where `infer` finds them."""

    def written_operands(self, op: Operator) -> tuple[str, ...]:
        """Names of the variables that `op` changes in place."""
        names: list[str] = []
        for i, slot in enumerate(self.slots):
            if slot.name in self.writes:
                names += [r.name for r in refs(op.args[i:] if slot.variadic else op.args[i : i + 1])]
        names += [r.name for name in self.writes if name in op.attrs for r in refs(op.attrs[name])]
        return tuple(names)


_OPS: dict[str, OpDef] = {}


def op(
    name: str,
    *,
    infer: Infer | Sequence[Type] = (),
    check: Check | None = None,
    writes: Sequence[str] = (),
    effect: bool = False,
    attrs: Sequence[Attr] = (),
) -> Callable[[Kernel], Kernel]:
    """Registers the decorated kernel as op `name`. `infer` is the result types, or a function of (operator, block)."""

    def register(kernel: Kernel) -> Kernel:
        slots, own = _signature(kernel)
        fixed = () if callable(infer) else tuple(infer)
        types: Infer = infer if callable(infer) else lambda op, block: fixed
        if name in _OPS:
            raise ValueError(f"op {name} is defined twice")
        _OPS[name] = OpDef(
            name,
            kernel,
            slots,
            (*own, *attrs),
            types,
            check,
            tuple(writes),
            effect,
            inspect.getdoc(kernel) or "",
            kernel.__module__.rsplit(".", 1)[-1],
            results=None if callable(infer) else fixed,
        )
        return kernel

    return register


def attributes_of(options: type, without: Container[str] = ()) -> tuple[Attr, ...]:
    """The fields of a dataclass as attributes."""
    hints = typing.get_type_hints(options)
    return tuple(
        Attr(f.name, hints[f.name], inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default)
        for f in dataclasses.fields(options)
        if f.name not in without
    )


def get(name: str) -> OpDef | None:
    """The definition of op `name`, or None. The first call imports graphft's own ops."""
    if name not in _OPS:
        ops = importlib.import_module("graphft.ops")
        family = ops.prim if name.startswith("prim.") else ops.aten
        if "." in name and (found := family.define(name)) is not None:
            _OPS[name] = found
    return _OPS.get(name)


def require(op: Operator, block: Block | None = None, index: int | None = None) -> OpDef:
    """The definition of `op`, or ProgramError[unknown-op] with near matches."""
    found = get(op.type)
    if found is None:
        near = difflib.get_close_matches(op.type, list(_OPS), 3)
        raise ProgramError(
            f"no op is named {op.type}",
            block=block,
            index=index,
            rule="unknown-op",
            help=f"did you mean {' or '.join(near)}?" if near else "see docs/ops.md for the ops",
        )
    return found


def own_ops() -> list[OpDef]:
    """Definitions registered one by one, by family and name: for the op reference."""
    importlib.import_module("graphft.ops")
    return sorted((d for d in _OPS.values() if "." not in d.name), key=lambda d: (d.family, d.name))


def infer(op: Operator, block: Block) -> Sequence[Type]:
    """Checks `op`'s operands and attributes against its definition; returns its result types."""
    definition = require(op, block)
    check_operands(op, block, definition)
    types = tuple(definition.infer(op, block))
    if definition.check is not None:
        definition.check(op, block)
    return types


def writes_of(op: Operator) -> tuple[str, ...]:
    """Everything `op` writes: its results, and the operands it changes in place."""
    definition = get(op.type)
    return op.writes + (definition.written_operands(op) if definition else ())


def given_attrs(op: Operator) -> dict[str, Any]:
    """`op`'s attributes without those that equal their default: what is printed, and compared."""
    definition = get(op.type)
    if definition is None or not op.attrs:
        return op.attrs
    defaults = {a.name: a.default for a in definition.attrs if not a.required}
    return {k: v for k, v in op.attrs.items() if k not in defaults or not same(v, defaults[k])}


def in_slot(op: Operator, name: str) -> tuple[Any, ...]:
    """The operands in this slot of the op's definition."""
    slots = require(op).slots
    at = next(i for i, slot in enumerate(slots) if slot.name == name)
    return op.args[at:] if slots[at].variadic else op.args[at : at + 1]


def attr(op: Operator, name: str) -> Any:
    """The value of an attribute: the given one, or its default."""
    if name in op.attrs:
        return op.attrs[name]
    return next(a.default for a in require(op).attrs if a.name == name)


def check_operands(op: Operator, block: Block, definition: OpDef) -> None:
    """Operand count, existence of variables, attribute names and types. Families check theirs in `infer`."""

    def fail(rule: str, message: str, help: str) -> ProgramError:
        return ProgramError(f"{op.type} {message}", block=block, rule=rule, help=help)

    for r in refs((*op.args, *op.attrs.values())):
        if r.name not in block.program.variables:
            raise fail("undeclared", f"reads {r}, which is not declared", "declare it, or produce it by an op")
    if definition.extra.get("own_arguments"):
        return
    fixed, variadic = len([s for s in definition.slots if not s.variadic]), any(s.variadic for s in definition.slots)
    if len(op.args) < fixed or (len(op.args) > fixed and not variadic):
        names = ", ".join(("*" if s.variadic else "") + s.name for s in definition.slots)
        raise fail("operands", f"takes operands ({names}), got {len(op.args)}", f"give {fixed} operands")
    known = {a.name: a for a in definition.attrs}
    for name, value in op.attrs.items():
        if name not in known:
            help = f"its attributes are {', '.join(known) or 'none'}"
            raise fail("attribute", f"has no attribute {name}", help)
        try:
            msgspec.convert(value, known[name].type)
        except msgspec.ValidationError as error:
            raise fail("attribute-type", f"has {name} = {value!r}: {error}", "correct the attribute") from None
    if missing := [a.name for a in definition.attrs if a.required and a.name not in op.attrs]:
        raise fail("attribute", f"needs attribute {', '.join(missing)}", f"add {missing[0]}=...")


def _signature(kernel: Kernel) -> tuple[tuple[Slot, ...], tuple[Attr, ...]]:
    hints = typing.get_type_hints(kernel)
    slots, attrs = [], []
    for p in list(inspect.signature(kernel).parameters.values())[1:]:
        if p.kind is p.KEYWORD_ONLY:
            attrs.append(Attr(p.name, hints.get(p.name, Any), p.default))
        elif p.kind is not p.VAR_KEYWORD:
            slots.append(Slot(p.name, p.kind is p.VAR_POSITIONAL, hints.get(p.name) is Ref))
    return tuple(slots), tuple(attrs)
