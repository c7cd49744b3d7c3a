"""Torch's own operators: `aten.addmm`, `aten.add.Tensor`, and those of any other torch namespace.

One definition serves them all, made from torch's operator schema: operands and attributes are the schema's
positional and keyword-only arguments, the kernel is torch's, and result types come from running it on tensors
without data, where torch checks the arguments. `aten.NAME` is the overload `default`, `aten.NAME.OVERLOAD` any other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from graphft.errors import ProgramError
from graphft.ir import Arg, Block, Operator, Ref, Type
from graphft.ir.literals import literal, resolve
from graphft.ir.registry import Attr, OpDef, Slot
from graphft.ops.prim import dim_of

_BATCH_NORMS = ("native_batch_norm", "batch_norm", "_batch_norm_impl_index", "cudnn_batch_norm", "miopen_batch_norm")
_HIDDEN_WRITES = {f"aten::{name}": ("running_mean", "running_var") for name in (*_BATCH_NORMS, "instance_norm")}
"""Arguments that a kernel changes in place though its schema does not say so (in training mode)."""


def define(name: str) -> OpDef | None:
    """The definition of torch operator `name`, or None."""
    namespace, _, rest = name.partition(".")
    packet_name, _, overload_name = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    overload = getattr(packet, overload_name or "default", None) if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(overload, OpOverload) or overload_name == "default":
        return None
    schema = overload._schema
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    lists = tuple(str(r.type).startswith("List[") for r in schema.returns)
    return OpDef(
        name,
        overload,
        tuple(Slot(a.name) for a in schema.arguments if not a.kwarg_only),
        tuple(
            Attr(a.name, Any, literal(a.default_value) if a.has_default_value() else inspect.Parameter.empty)
            for a in schema.arguments
            if a.kwarg_only
        ),
        functools.partial(_infer, overload),
        writes=writes + _HIDDEN_WRITES.get(schema.name, ()),
        effect=torch.Tag.nondeterministic_seeded in overload.tags or (not schema.returns and not writes),
        doc=f"Torch's `{schema}`.",
        family=namespace,
        # of split, unbind ...: which results are lists of tensors, of which a program holds the elements
        extra={"own_arguments": True, "context_free": True} | ({"result_lists": lists} if any(lists) else {}),
    )


# -- inference ----------------------------------------------------------------------------------------------------


class _TorchError(Exception):
    """Torch's error, with the dimensions' names in it."""


@dataclass(frozen=True, slots=True)
class _Dim:
    """An integer operand whose value is this expression over named dimensions."""

    expression: int | str

    def __str__(self) -> str:
        return str(self.expression)


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator applied to types and literals. Compared by text: 1, 1.0 and true are equal in Python."""

    overload: OpOverload = field(compare=False)
    args: tuple[Any, ...] = field(compare=False)
    kwargs: dict[str, Any] = field(compare=False)
    text: str


def _infer(overload: OpOverload, op: Operator, block: Block) -> Sequence[Type]:
    def operand(arg: Arg) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(operand, arg))
        if not isinstance(arg, Ref):
            return arg
        type = block.program.variables[arg.name].type
        return _Dim(dim_of(arg.name, block)) if type.dtype == "int" and not type.is_tensor else type

    args, kwargs = operand(op.args), {k: operand(v) for k, v in op.attrs.items()}
    try:
        return _result_types(_Call(overload, args, kwargs, f"{op.type} {args!r} {sorted(kwargs.items())!r}"))
    except _TorchError as error:
        first = str(error).strip().split("\n", 1)[0]
        given = ", ".join(_show(a) for a in (*args, *kwargs.values()))
        others = [o for o in overload.overloadpacket.overloads() if o not in ("default", overload._overloadname)]
        raise ProgramError(
            f"{op.type} does not take ({given}): {first}",
            block=block,
            index=next((i for i, o in enumerate(block.ops) if o is op), None),
            rule="shape",
            help=f"its schema is {overload._schema}" + f"; other overloads are {', '.join(others)}" * bool(others),
        ) from error


def _show(value: Any) -> str:
    return f"({', '.join(map(_show, value))})" if isinstance(value, tuple) else str(value)


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
    leaves = [] if results is None else tree_leaves(results)
    return tuple(Type("none") if r is None else symbols.type_of(r) for r in leaves)


def _sizes(args: Any) -> Iterator[int]:
    for a in args:
        if isinstance(a, tuple):
            yield from _sizes(a)
        elif isinstance(a, Type):
            yield from (d for d in a.shape or () if isinstance(d, int))


# -- the state of the CPU's default generator ---------------------------------------------------------------------
#
# A trace records torch.get_rng_state, set_rng_state and manual_seed, which checkpointing and fork_rng call, as these.

_LIBRARY = torch.library.Library("graphft", "DEF")
_STATE_BYTES = torch.default_generator.get_state().numel()


def _set_rng_state(state: Tensor) -> None:
    torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


for _name, _schema, _kernel, _fake in (
    ("get_rng_state", "() -> Tensor", torch.default_generator.get_state, lambda: torch.empty(_STATE_BYTES).byte()),
    ("set_rng_state", "(Tensor state) -> ()", _set_rng_state, lambda state: None),
    ("manual_seed", "(int seed) -> ()", _manual_seed, lambda seed: None),
):
    _LIBRARY.define(f"{_name}{_schema}", tags=torch.Tag.nondeterministic_seeded)
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphft::{_name}", _fake, lib=_LIBRARY)
    fx.node.has_side_effect(getattr(torch.ops.graphft, _name).default)
