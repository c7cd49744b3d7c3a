"""Gradients for programs built by hand: what capture does for a model, for the ops of a block.

loss = block.append_op("aten.mse_loss", prediction, y, outputs="loss")
graphft.append_backward(loss)              # the block now ends with ops that compute <parameter>@GRAD
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from graphft.capture.guards import captured
from graphft.capture.tracing import Emitter, Recorder, settle, storage, trace
from graphft.errors import ProgramError
from graphft.ir import Block, Kind, Operator, Variable, grad_name, map_refs, registry
from graphft.ir.literals import resolve
from graphft.ir.symbolic import Symbols
from graphft.ir.verify import verify


def append_backward(loss: Variable, params: Sequence[Variable | str] | None = None) -> list[tuple[Variable, Variable]]:
    """Appends ops that compute the gradients of `loss`, and returns pairs of parameter and gradient.

    `params` are the parameters wanted, by default all PARAM variables of the program. Forward ops and names stay as
    they are, but for composite ops (`aten.linear`, `aten.mse_loss` ...), which are written out: their gradients need
    what they compute inside. A forward result that was not wanted gets a name if a gradient needs it. The block is
    left as it was if an error is raised:

    ProgramError: [loss] if it is no float scalar that an op of the program computes, [redeclared] if there are
    gradients already, [no-gradient] for a parameter that the loss does not depend on, and what `verify` finds (an op
    before its operands, a wrong shape).
    """
    block = _block_of(loss)
    program = block.program
    names = (
        [v.name for v in program.of_kind(Kind.PARAM)]
        if params is None
        else [p if isinstance(p, str) else p.name for p in params]
    )
    _check(block, loss, names)
    verify(program)
    step = _Backward(block, loss.name, names)
    gradients = step.write()
    program.attrs.setdefault("loss", loss.name)
    return [(program.variables[n], program.variables[g]) for n, g in gradients.items()]


def _block_of(loss: Variable) -> Block:
    for block in loss.program.blocks.values() if loss.program is not None else ():
        if any(loss.name in op.outputs for op in block.ops):
            return block
    raise ProgramError(f"no op computes the loss %{loss.name}", rule="loss", help="append the ops of the forward pass")


def _check(block: Block, loss: Variable, names: Sequence[str]) -> None:
    variables = block.program.variables
    if loss.type.shape != () or not loss.dtype.startswith(("float", "bfloat")):
        what = f"the loss %{loss.name} must be one float, is {loss.type}"
        raise ProgramError(what, block=block, rule="loss", help="take its mean over the batch, aten.mean")
    for name in names:
        if name not in variables or variables[name].kind is not Kind.PARAM:
            raise ProgramError(f"%{name} is no parameter", rule="undeclared", help="declare it with kind PARAM")
        if grad_name(name) in variables:
            what = f"%{grad_name(name)} is there already"
            raise ProgramError(what, block=block, rule="redeclared", help="append the gradients once")
    if not names:
        raise ProgramError("there is no parameter", rule="no-gradient", help="declare one with kind PARAM")


class _Backward:
    """One block on its way: the function that interprets its torch ops, and the ops made from its record."""

    def __init__(self, block: Block, loss: str, parameters: Sequence[str]) -> None:
        self.block, self.loss, self.parameters = block, loss, list(parameters)
        self.variables = block.program.variables
        self.traced_ops = [i for i, op in enumerate(block.ops) if _is_torch(op)]
        produced: set[str] = set()
        inputs: dict[str, None] = {}
        for i in self.traced_ops:
            inputs.update(dict.fromkeys(n for n in block.ops[i].reads if n not in produced))
            produced.update(block.ops[i].writes)
        inputs.update(dict.fromkeys(parameters))
        self.inputs = list(inputs)
        self.recorder = Recorder()
        self.missing: list[str] = []

    def write(self) -> dict[str, str]:
        """Replaces the block's ops; returns gradient names by parameter."""
        symbols = Symbols(d for v in self.variables.values() for d in v.shape if isinstance(d, int))
        with captured(symbols):
            traced = trace(self._run, [self._input(n, symbols) for n in self.inputs], symbols, self.recorder)
        if self.missing:
            raise ProgramError(
                f"the loss %{self.loss} does not depend on parameter {', '.join(self.missing)}",
                block=self.block,
                rule="no-gradient",
                help="use it, or give it kind FROZEN, or name the wanted ones in params",
            )
        nodes = {n: n.meta["variable"] for n in traced.module.graph.nodes if "variable" in n.meta}
        gradients = [r for r in traced.results[len(traced.results) - len(self.parameters) :] if r is not None]
        names = {n: grad_name(n) for n in self.parameters}
        nodes.update(zip(gradients, names.values(), strict=True))
        self._place(Emitter(traced, self.block, self.inputs, nodes))
        return names

    def _input(self, name: str, symbols: Symbols) -> Any:
        type = self.variables[name].type
        if type.is_tensor:
            return symbols.tensor(type).requires_grad_(name in self.parameters)
        if type.dtype != "int":
            raise ProgramError(
                f"%{name} of type {type} cannot take part in a differentiated block",
                block=self.block,
                rule="operand-type",
                help="make it a tensor",
            )
        return symbols.dim(name)

    def _run(self, *values: Any) -> list[Any]:
        """The traced function: results of the forward ops, and the gradients."""
        env = dict(zip(self.inputs, values, strict=True))
        for index in self.traced_ops:
            self._interpret(index, env)
        parameters = [env[n] for n in self.parameters]
        self.recorder.loc = None
        loss = env[self.loss]
        if not loss.requires_grad:
            self.missing = self.parameters
            return []
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        self.missing = [n for n, g in zip(self.parameters, gradients, strict=True) if g is None]
        tensors = {n: v for n, v in env.items() if isinstance(v, Tensor)}
        taken = {storage(v) for v in tensors.values()}
        with torch.no_grad():
            settled = [settle(g, p, taken) for g, p in zip(gradients, parameters, strict=True) if g is not None]
        return [v for n, v in tensors.items() if n not in self.inputs] + settled

    def _interpret(self, index: int, env: dict[str, Any]) -> None:
        op = self.block.ops[index]
        self.recorder.loc = op.loc
        before = self.recorder.last
        args = map_refs(op.args, lambda r: env[r.name])
        kwargs = {k: map_refs(v, lambda r: env[r.name]) for k, v in op.attrs.items()}
        kernel = registry.require(op).kernel
        made = kernel(*(resolve(a, "cpu") for a in args), **{k: resolve(v, "cpu") for k, v in kwargs.items()})
        results = [r for r in tree_leaves(made) if r is not None or op.outputs]
        for name, value in zip(op.outputs, results, strict=True):
            if name is not None:
                env[name] = self._named(name, value)
        for node in self.recorder.new_nodes(before):
            node.meta["origin"] = index

    def _named(self, name: str, value: Any) -> Any:
        """`value`, its node marked as the variable's; a new one if the op only handed on what it got."""
        if isinstance(value, Tensor):
            node = self.recorder.node_of(value)
            if node.op == "placeholder" or "variable" in node.meta:
                value = torch.ops.aten.alias.default(value)
                node = self.recorder.node_of(value)
            node.meta["variable"] = name
        return value

    def _place(self, emitter: Emitter) -> None:
        """Puts the recorded ops where their originals stand, and those of the backward pass at the end."""
        recorded: dict[int | None, list[Operator]] = {}
        for op, node in emitter.ops:
            recorded.setdefault(node.meta.get("origin"), []).append(op)
        ops: list[Operator] = []
        for index, original in enumerate(self.block.ops):
            ops += _merged(original, recorded.pop(index, []), self._makes_tensors(original))
        for rest in recorded.values():
            ops += rest
        self.block.ops[:] = ops

    def _makes_tensors(self, op: Operator) -> bool:
        return any(self.variables[n].type.is_tensor for n in op.writes) or not op.writes


def _is_torch(op: Operator) -> bool:
    definition = registry.get(op.type)
    return definition is not None and bool(definition.extra.get("context_free"))


def _merged(original: Operator, recorded: list[Operator], tensors: bool) -> list[Operator]:
    """The ops that stand for `original`: itself wherever it was recorded as one op, or else what it consists of."""
    same = [i for i, op in enumerate(recorded) if op.type == original.type]
    if not tensors or not recorded:
        return [*recorded, original]
    if len(same) == 1 and all(_is_scalar(op) for i, op in enumerate(recorded) if i != same[0]):
        kept = replace(
            original, outputs=tuple(a or b for a, b in zip(original.outputs, recorded[same[0]].outputs, strict=True))
        )
        return [*recorded[: same[0]], kept, *recorded[same[0] + 1 :]]
    return recorded


def _is_scalar(op: Operator) -> bool:
    return op.type.startswith(("prim.", "aten.sym_"))
