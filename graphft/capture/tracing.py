"""From a Python function on tensors to operators: `trace` records them, `emit` writes them as ops of a block."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from graphft.capture.guards import WITHOUT_CAPTURE
from graphft.capture.locations import TRACED, user_line
from graphft.errors import GraphftError
from graphft.ir import Arg, Block, Kind, Operator, Ref, Type, Variable, registry, same
from graphft.ir.dependence import alias_classes
from graphft.ir.literals import literal
from graphft.ir.symbolic import Symbols, quiet

_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default})
"""Without autograd, these are their operand."""


_RECURRENT = tuple(
    getattr(getattr(torch.ops.aten, kind), overload)
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
)
_MARGIN_LOSSES = (torch.ops.aten.multi_margin_loss.default, torch.ops.aten.multilabel_margin_loss_forward.default)
_WHOLE: tuple[OpOverload, ...] = (*_MARGIN_LOSSES, *_RECURRENT)
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@dataclass(frozen=True, slots=True)
class Traced:
    """A recorded function: the graph, and the node of each of its results (None where it gave none)."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    results: list[fx.Node | None]
    symbols: Symbols


# -- recording ------------------------------------------------------------------------------------------------


def trace(
    fn: Callable[..., Sequence[Any]], inputs: Sequence[Any], symbols: Symbols, recorder: Recorder | None = None
) -> Traced:
    """Records `fn(*inputs)`. Every node's `meta["loc"]` is the user's line, where there is one.

    Give a `recorder` to use it inside `fn`. Whatever `fn` raises passes through.
    """
    recorder = recorder or Recorder()

    def traced_by_graphft(*args: Any) -> list[Any]:
        with recorder:
            return list(fn(*args))

    with (
        _without_onednn(),
        _undecomposed(),
        _random_state_traced(),
        fx_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        quiet(),
    ):
        module = make_fx(
            traced_by_graphft, tracing_mode="symbolic", decomposition_table={}, _allow_non_fake_inputs=True
        )(*inputs)
    nodes = list(module.graph.nodes)
    (results,) = nodes[-1].args
    return Traced(module, [n for n in nodes if n.op == "placeholder"], list(results), symbols)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN's LSTM keeps a workspace that does not survive a replay without autograd: record the LSTM's own ops."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def _undecomposed() -> Iterator[None]:
    """Has torch take these operators apart by its C++ code, as eager torch does, or not at all.

    What torch's Python code makes of them while it traces (2.13) is wrong: margin losses count labels that pad a
    target, recurrent networks lose the dropout between their layers.
    """
    taken = [(op, key, op.py_kernels.pop(key)) for op in _WHOLE for key in _KEYS if key in op.py_kernels]
    for op in _WHOLE:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


class _TracedGenerator:
    """Torch's default generator while a function is traced: what the tracing thread does to its state is recorded."""

    def __init__(self) -> None:
        self._real, self._thread = torch.default_generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        traced = {"get_state": "get_rng_state", "set_state": "set_rng_state", "manual_seed": "manual_seed"}.get(name)
        if traced is None or threading.get_ident() != self._thread:
            return getattr(self._real, name)
        return getattr(torch.ops.graphft, traced)


@contextmanager
def _random_state_traced() -> Iterator[None]:
    """Records `torch.get_rng_state`, `set_rng_state` and `manual_seed` as ops: what is drawn after a state was restored
    must be drawn again in each step. The generator itself stays as it was."""
    importlib.import_module("graphft.ops")
    torch.random.default_generator = _TracedGenerator()  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = torch.default_generator


class Recorder(TorchDispatchMode):
    """Notes for every recorded node which line of the user's code it comes from, as `meta["loc"]`.

    A node of the backward pass gets the line of the forward op whose gradient it computes: autograd numbers both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loc: str | None = None
        """Stands for the user's line, when it is not None."""
        self._forward: dict[int, str] = {}

    def __enter__(self) -> Recorder:
        mode = get_proxy_mode()
        assert mode is not None
        self._tracer = mode.tracer
        self._seen: fx.Node = self._tracer.graph._root.prev
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        if node is not None:
            loc = self.line_of(node)
        else:
            loc = user_line(sys._getframe(1), until=TRACED) if self.loc is None else self.loc
            if torch.is_grad_enabled():
                self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, loc)
        result = func(*args, **(kwargs or {}))
        for new in self.new_nodes():
            new.meta["loc"] = loc
        return result

    def new_nodes(self, since: fx.Node | None = None) -> list[fx.Node]:
        """Nodes recorded after `since` (by default, since the last call)."""
        since, self._seen = since or self._seen, self.last
        found, node = [], self.last
        while node is not since:
            found.append(node)
            node = node.prev
        return found

    def line_of(self, node: Any) -> str:
        """The user's line whose op a node of the autograd graph belongs to; "" if it is not known."""
        return self._forward.get(node._sequence_nr(), "")

    @property
    def last(self) -> fx.Node:
        """The node recorded last."""
        return self._tracer.graph._root.prev

    def node_of(self, value: Tensor) -> fx.Node:
        """The node that a traced tensor is the value of."""
        return get_proxy_slot(value, self._tracer).proxy.node


def settle(gradient: Tensor, parameter: Tensor, taken: set[int]) -> Tensor:
    """`gradient` in its parameter's layout and in memory of its own, as autograd leaves it in `.grad`.

    `taken` are storages in use; that of the result is added.
    """
    same = gradient.stride() == parameter.stride() or (gradient.is_contiguous() and parameter.is_contiguous())
    if not same or storage(gradient) in taken:
        gradient = torch.empty_like(parameter).copy_(gradient)
    taken.add(storage(gradient))
    return gradient


def storage(value: Tensor) -> int:
    """Identifies the memory that a tensor lies in."""
    return value.untyped_storage()._cdata


# -- writing --------------------------------------------------------------------------------------------------


def emit(traced: Traced, block: Block, inputs: Sequence[str], results: Mapping[fx.Node, str]) -> set[str]:
    """Appends what was recorded to `block`, without what has neither a use nor an effect.

    `inputs` name the variables that the function's inputs stand for, `results` the variables that get the values of
    nodes; all else gets fresh names. Constants become CONST variables. Returns the inputs that are written in place.
    """
    emitter = Emitter(traced, block, inputs, results)
    block.ops += [op for op, _ in emitter.ops]
    return emitter.written()


class Emitter:
    """Makes `ops`: each op of a record with its node, in order, and declares their results. See `emit`."""

    def __init__(self, traced: Traced, block: Block, inputs: Sequence[str], results: Mapping[fx.Node, str]) -> None:
        self.traced, self.block, self.program, self.inputs = traced, block, block.program, inputs
        self.names: dict[fx.Node, str] = {}
        for node, name in results.items():
            self.names[_unaliased(node, {*results, *self.names})] = name
        self.values: dict[fx.Node, Arg] = {n: Ref(name) for n, name in zip(traced.inputs, inputs, strict=True)}
        self.types: dict[str, Type] = {}
        self.reserved = {*self.names.values(), *inputs}  # some inputs are declared later
        self.constants: dict[int, str] = {}
        self.ops: list[tuple[Operator, fx.Node]] = []
        self._make()

    def _make(self) -> None:
        for node in self.traced.module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = Ref(self._constant(node, getattr(self.traced.module, node.target)))
            elif node.op == "call_function":
                self._call(node)
        kept = {id(op) for op in prune([op for op, _ in self.ops], set(self.names.values()))}
        self.ops = [(op, node) for op, node in self.ops if id(op) in kept]
        for op, _ in self.ops:
            for name in op.writes:
                if name not in self.program.variables:
                    self.program.variables[name] = Variable(name, self.types[name], Kind.TEMP, {}, self.program)

    def written(self) -> set[str]:
        """Inputs that the block's ops change in place, be it through a view.

        Raises GraphftError[constant-written] if a constant is changed.
        """
        memory = alias_classes(self.block)
        constants = {memory(name) for name in self.constants.values()}
        changed = set()
        for op, _ in self.ops:
            definition = registry.get(op.type)
            for name in definition.written_operands(op) if definition else ():
                changed.add(memory(name))
                if memory(name) in constants:
                    raise GraphftError(
                        f"{op.loc or 'the model'} changes a tensor that is neither a parameter nor a "
                        f"buffer: its new value would be lost",
                        rule="constant-written",
                        help="make it a buffer: self.register_buffer(name, tensor)",
                    )
        return {name for name in self.inputs if memory(name) in changed}

    def _call(self, node: fx.Node) -> None:
        if node.target in _ALIASES and node not in self.names:
            self.values[node] = self._arg(node.args[0])
            return
        if getattr(node.target, "__name__", "") == "getitem" and not isinstance(node.target, OpOverload):
            source, index = node.args
            assert isinstance(source, fx.Node)
            self.values[node] = self.values[source][index]
            return
        type, defaults = self._op(node)
        attrs = {k: self._arg(v) for k, v in node.kwargs.items() if k != "pin_memory"}
        attrs = {k: v for k, v in attrs.items() if k not in defaults or not same(v, defaults[k])}
        args = tuple(map(self._arg, node.args))
        self.values[node], names = self._results(node)
        self.ops.append((Operator(type, args, attrs, tuple(names), node.meta.get("loc", "")), node))

    def _op(self, node: fx.Node) -> tuple[str, dict[str, Arg]]:
        from graphft.ops.prim import NAMES

        target = node.target
        if isinstance(target, OpOverload):
            name = op_name(target)
            definition = registry.get(name)
            if definition is not None:
                return name, {a.name: a.default for a in definition.attrs if not a.required}
        elif target in NAMES:
            return f"prim.{NAMES[target]}", {}
        raise GraphftError(
            f"{target} cannot be captured ({node.meta.get('loc') or 'no line known'})",
            rule="capture",
            help="write this part of the model with ordinary torch functions",
        )

    def _arg(self, value: Any) -> Arg:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(self._arg, value))
        return literal(value)

    def _results(self, node: fx.Node) -> tuple[Arg, list[str | None]]:
        """The node's value as operands (nested as torch nests it), and the names of its results."""
        value = node.meta.get("val")
        if not isinstance(value, (tuple, list)):
            if value is None:
                return None, []
            name = self._name(node, node.name, value)
            return Ref(name), [name]
        picked = {n.args[1]: n for n in node.users if getattr(n.target, "__name__", "") == "getitem"}
        names: list[str | None] = []
        values: list[Arg] = []
        for i, item in enumerate(value):
            if isinstance(item, (tuple, list)):
                inner = [self._name(None, f"{node.name}.{i}.{j}", v) for j, v in enumerate(item)]
                names += inner
                values.append(tuple(map(Ref, inner)))
            elif item is None:
                names.append(None)
                values.append(None)
            else:
                name = self._name(picked.get(i), f"{node.name}.{i}", item)
                names.append(name)
                values.append(Ref(name))
        return tuple(values), names

    def _name(self, node: fx.Node | None, stem: str, value: Any) -> str:
        name = self.names.get(node) if node is not None else None
        if name is None:
            name = self.program.fresh(stem, self.reserved)
        self.reserved.add(name)
        self.types[name] = self.traced.symbols.type_of(value)
        return name

    def _constant(self, node: fx.Node, value: Any) -> str:
        if not isinstance(value, Tensor):
            line = next((user.meta["loc"] for user in node.users if user.meta.get("loc")), "the model")
            raise GraphftError(
                f"{line} uses a {type(value).__name__} of its own, which a program cannot hold",
                rule="capture",
                help=f"draw random numbers from torch's default generator; or {WITHOUT_CAPTURE}",
            )
        if id(value) not in self.constants:
            name = self.program.fresh("const", self.reserved)
            self.constants[id(value)] = name
            self.program.variable(name, self.traced.symbols.type_of(value), Kind.CONST, value.detach().clone().cpu())
        return self.constants[id(value)]


def _unaliased(node: fx.Node, taken: Container[fx.Node]) -> fx.Node:
    """The node whose value `node` hands on, unless that is an input or has a name of its own."""
    while node.target in _ALIASES and isinstance(source := node.args[0], fx.Node):
        if source in taken or source.op != "call_function":
            break
        node = source
    return node


def prune(ops: Sequence[Operator], wanted: set[str]) -> list[Operator]:
    """`ops` without those whose results are not read; single results that are not read are None in what is left."""
    live = set(wanted)
    kept = []
    for op in reversed(ops):
        definition = registry.get(op.type)
        lasting = definition is None or definition.effect or bool(definition.written_operands(op))
        if lasting or any(o in live for o in op.writes):
            op.outputs = tuple(o if o in live else None for o in op.outputs)
            live.update(op.reads)
            kept.append(op)
    return kept[::-1]


def op_name(overload: OpOverload) -> str:
    """The name of torch's operator in a program: `aten.addmm`, `aten.add.Tensor`."""
    namespace, _, name = overload._schema.name.partition("::")
    return f"{namespace}.{name}" + ("" if overload._overloadname == "default" else f".{overload._overloadname}")
