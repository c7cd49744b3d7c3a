"""Finds in a minimized program what evolves the parameters: updates, gradient clipping, the schedule."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphft.errors import ProgramError
from graphft.ir import Arg, Block, Kind, Operator, Program, Ref, Variable, registry
from graphft.ir.literals import resolve
from graphft.optim.grad_scaler import UPDATE
from graphft.optim.optimizers import CLIP_OPS, OPTIMIZER_OPS, SCALAR_STATE
from graphft.optim.training import GLOBAL_STEP

log = logging.getLogger("graphft")
NORM_OP = "squared_norms"


@dataclass(frozen=True)
class Optimization:
    """The part of block `step` that leaves the trainer. Each op of it stands in exactly one field."""

    updates: dict[str, Operator]
    """The optimizer op of each parameter."""
    norm: Operator | None
    """`squared_norms`, where gradients are clipped by their global norm."""
    before_norm: dict[str, list[Operator]]
    """Clip ops that stand before `norm`, by gradient."""
    clips: dict[str, list[Operator]]
    """Clip ops behind it (all, where there is none), by gradient."""
    schedule: list[Operator]
    """Ops that compute the learning rates and count the steps, in order."""
    scaler: Operator | None = None
    """`update_scale`, where the loss is scaled."""

    @property
    def ops(self) -> list[Operator]:
        clips = [op for ops in (*self.before_norm.values(), *self.clips.values()) for op in ops]
        single = [op for op in (self.norm, self.scaler) if op is not None]
        return [*self.updates.values(), *single, *clips, *self.schedule]

    @property
    def evolvers(self) -> dict[str, Operator]:
        """The op that evolves each parameter, and the loss scale."""
        return self.updates | ({self.scaler.operand("scale").name: self.scaler} if self.scaler is not None else {})

    def state_of(self, variable: Variable) -> list[Variable]:
        """Returns the state of what evolves a variable; a buffer of the model has none."""
        assert variable.program is not None
        op = self.evolvers.get(variable.name)
        return [variable.program.variables[r.name] for r in state_operands(op)] if op is not None else []


def find_optimization(block: Block) -> Optimization:
    """Raises ProgramError when a parameter has no optimizer op, or one that no shard could run by itself."""
    updates = _updates(block)
    gradients = {op.operand("grad").name for op in updates.values()}
    norms = [op for op in block.ops if op.type == NORM_OP and gradients.issuperset(op.reads)]
    if len(norms) > 1:
        raise _bad("two-norms", f"{len(norms)} global norms are computed", "use one for all gradients", block, norms[1])
    norm_at = next((i for i, op in enumerate(block.ops) if norms and op is norms[0]), -1)
    before: dict[str, list[Operator]] = {}
    after: dict[str, list[Operator]] = {}
    for i, op in enumerate(block.ops):
        if op.type in CLIP_OPS and op.operand("grad").name in gradients:
            (before if i < norm_at else after).setdefault(op.operand("grad").name, []).append(op)
    scaler = block.program.find_op(UPDATE)
    found = Optimization(updates, norms[0] if norms else None, before, after, _schedule(block, updates, scaler), scaler)
    _check_alone(block, found)
    return found


def state_operands(update: Operator) -> tuple[Ref, ...]:
    """Returns the state that an op evolves beside the parameter (or the loss scale): its last operands."""
    given = ("param", "grad", "lr", "scale")
    return tuple(r for s in registry.require(update).slots if s.name not in given for r in update.operands(s.name))


def scalar_state(state: Variable, parameter: Variable) -> bool:
    """True if a state variable is one number for the whole parameter, which each of its slices has a copy of."""
    return state.shape == () and (parameter.shape != () or state.name.endswith(f"@{SCALAR_STATE}"))


def _updates(block: Block) -> dict[str, Operator]:
    updates: dict[str, Operator] = {}
    for op in block.ops:
        if op.type in OPTIMIZER_OPS:
            name = op.operand("param").name
            if name in updates:
                text = f"%{name} is updated twice in a step"
                raise _bad("updated-twice", text, "give each parameter one optimizer op", block, op)
            updates[name] = op
    missing = [v.name for v in block.program.of_kind(Kind.PARAM) if v.name not in updates]
    if missing and not updates:
        help = "call graphft.minimize(program, graphft.SGD(lr=0.1)) before transpile()"
        raise _bad("not-minimized", f"program '{block.program.name}' has no optimizer", help, block)
    if missing:
        text = f"%{missing[0]} is a parameter, but no optimizer op updates it"
        raise _bad("no-optimizer", text, "pass it to the optimizer, or freeze it", block)
    return updates


def _schedule(block: Block, updates: dict[str, Operator], scaler: Operator | None) -> list[Operator]:
    """Returns the ops that the learning rates, and state of no parameter, come from."""
    own = {r.name for op in (*updates.values(), *([scaler] if scaler else [])) for r in state_operands(op)}
    needed = {op.operand("lr").name for op in updates.values()}
    needed |= {v.name for v in block.program.of_kind(Kind.STATE) if v.name not in own}
    taken: set[int] = set()
    while True:
        more = [i for i, op in enumerate(block.ops) if i not in taken and needed.intersection(registry.writes_of(op))]
        if not more:
            return [block.ops[i] for i in sorted(taken)]
        taken.update(more)
        needed.update(name for i in more for name in block.ops[i].reads)


def _check_alone(block: Block, found: Optimization) -> None:
    """A pserver has parameters, their state and constants, and no batch; a trainer has no optimizer state."""
    variables = block.program.variables
    for op in found.schedule:
        for name in op.reads:
            if variables[name].kind in (Kind.INPUT, Kind.PARAM, Kind.BUFFER):
                text = f"the learning rate depends on {variables[name].kind.value} %{name}"
                help = "a schedule is a function of the step; pservers see no batch"
                raise _bad("schedule-input", text, help, block, op)
    moved = {id(op) for op in found.ops}
    for op in block.ops:
        for name in (*op.reads, *op.writes) if id(op) not in moved else ():
            if variables[name].kind is Kind.STATE:
                text = f"{op.type} uses optimizer state %{name}, which trainers do not have"
                raise _bad("state-on-trainer", text, "let only optimizer and schedule ops use it", block, op)


def _bad(rule: str, text: str, help: str, block: Block, op: Operator | None = None) -> ProgramError:
    index = next((i for i, other in enumerate(block.ops) if other is op), None)
    return ProgramError(text, block=block, index=index, rule=rule, help=help)


def with_operands(op: Operator, names: dict[str, str]) -> Operator:
    """Returns `op` with its operands renamed; results and attributes stay."""
    args = tuple(Ref(names.get(a.name, a.name)) if isinstance(a, Ref) else a for a in op.args)
    return replace(op, args=args, attrs=dict(op.attrs))


# -- learning rates --------------------------------------------------------------------------------------------

SAMPLES = 16
"""So many of the last steps are looked at."""


def rates_at(program: Program, step: int) -> dict[str, float]:
    """Returns the learning rates of `step`, by the names of their variables."""
    found = find_optimization(program.blocks["step"])
    values: dict[str, Any] = {**program.values, GLOBAL_STEP: torch.tensor(step)}
    with torch.no_grad():
        for op in found.schedule:
            definition = registry.require(op)
            if not definition.extra.get("context_free"):  # it counts the step
                continue
            result = definition.kernel(
                *(_value(a, values) for a in op.args), **{k: _value(a, values) for k, a in op.attrs.items()}
            )
            results = result if isinstance(result, tuple) else (result,)
            values.update({name: r for name, r in zip(op.outputs, results, strict=True) if name is not None})
    return {name: float(values[name]) for name in sorted({op.operand("lr").name for op in found.updates.values()})}


def _value(arg: Arg, values: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, tuple):
        return tuple(_value(a, values) for a in arg)
    return resolve(arg, "cpu")


def warn_of_zero_rate(program: Program, steps: int) -> None:
    """Warns if a learning rate is 0 in the last hundredth of the job's steps, and the last eight."""
    last = min(steps, max(8, steps // 100))
    looked = [rates_at(program, k) for k in range(steps - last, steps, -(-last // SAMPLES))]
    for name in looked[0]:
        if not any(rates[name] for rates in looked):
            what = "the learning rate %%%s is 0 in the last %d of the job's %d steps: is its schedule made for fewer?"
            log.warning(what, name, last, steps)
