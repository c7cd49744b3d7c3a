"""Moves what evolves the parameters to the shards that own them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphft.ir import Kind, Program, Ref, Type, Variable, grad_name, registry
from graphft.ops.clip import UNIT
from graphft.transpiler.layout import EVOLVING, Slice, all_slices, slices_of
from graphft.transpiler.optimization import Optimization, find_optimization, scalar_state, with_operands
from graphft.transpiler.programs import Programs

ALL_NORMS = "sqnorm_all"
"""Input of a pserver's optimize blocks: the partial sums of squares of all shards, in canonical order."""


@dataclass(frozen=True)
class SplitOptimizer:
    """Moves optimizer, clip and schedule ops from the trainer to a new program per pserver; starts the coordinator's.

    A pserver has, of each slice s that it owns, the slice as a flat variable, its optimizer state, the input `s@GRAD`
    with the reduced contributions of the trainers, and a block `optimize.<s>`: the parameter's ops on the slice, or
    `assign(s, s@GRAD)` for a buffer. Block `schedule` computes the learning rates.

    Clipping by global norm: block `reduce` sums the squares of the shard's own gradients, unit by unit, into what its
    attribute `partials` names. In sync mode the shards named in its attribute `order` exchange these vectors; laid
    out in that order, (shard, start, count) each, they are the input `%sqnorm_all` of the optimize blocks: the units
    of the whole gradient, parameters in the order of `squared_norms`, whatever the number of shards. In async mode a
    shard clips by the norm of what it owns.

    Trainers keep no values but those of frozen variables and constants.
    """

    name: ClassVar[str] = "split-optimizer"
    shards: int = 1
    slice_unit: int = 8192
    sync: bool = True

    def run(self, job: Programs) -> Programs:
        source = job.trainer
        found = find_optimization(source.blocks["step"])
        pservers = tuple(self.pserver(source, found, shard) for shard in range(self.shards))
        coordinator = Program("coordinator", {"role": "coordinator"})
        return Programs(_trainer(source, found), pservers, coordinator, job.evaluation)

    def pserver(self, source: Program, found: Optimization, shard: int) -> Program:
        """The program of one shard."""
        program = Program(f"pserver{shard}", {"role": "pserver", "index": shard})
        owned = [s for s in all_slices(source) if s.shard == shard]
        for s in owned:
            _declare_slice(program, source.variables[s.variable], s, found)
        if found.schedule:
            block = program.block("schedule")
            for op in found.schedule:
                _copy_variables(program, source, (*op.reads, *op.writes))
                block.ops.append(with_operands(op, {}))
        if found.norm is not None:
            self._reduce(program, source, found, shard)
        for s in owned:
            self._optimize(program, source, found, s)
        return program

    def _reduce(self, program: Program, source: Program, found: Optimization, shard: int) -> None:
        """Block `reduce`: what is clipped before the norm, then the norm's own part of this shard."""
        norm = found.norm
        assert norm is not None
        unit = math.gcd(norm.attrs.get("unit", UNIT), self.slice_unit)
        order = _norm_slices(source, found)
        own = [s for s in order if s.shard == shard]
        if not own:
            return
        block = program.block("reduce")
        for s in own:
            gradient = found.updates[s.variable].operand("grad").name
            for op in found.before_norm.get(gradient, ()):
                block.ops.append(with_operands(op, {gradient: grad_name(s.name)}))
        partials = block.append_op(norm.type, *(Ref(grad_name(s.name)) for s in own), unit=unit, outputs=norm.outputs)
        block.attrs["partials"] = partials.ref
        if self.sync:
            runs = _runs(order, unit)
            block.attrs["order"] = runs
            program.variable(ALL_NORMS, Type("float64", (sum(count for _, _, count in runs),)), Kind.INPUT)

    def _optimize(self, program: Program, source: Program, found: Optimization, s: Slice) -> None:
        block = program.block(f"optimize.{s.name}")
        if s.variable not in found.updates:
            block.append_op("assign", Ref(s.name), Ref(grad_name(s.name)))
            return
        update, variable = found.updates[s.variable], source.variables[s.variable]
        gradient = update.operand("grad").name
        names = {s.variable: s.name, gradient: grad_name(s.name)}
        names |= {v.name: _state_name(v, s) for v in found.state_of(variable)}
        if found.norm is not None and self.sync:
            names[str(found.norm.outputs[0])] = ALL_NORMS
        for op in (*found.clips.get(gradient, ()), update):
            _copy_variables(program, source, (n for n in op.reads if n not in names))  # a constant learning rate
            moved = with_operands(op, names)
            registry.infer(moved, block)
            block.ops.append(moved)


def _trainer(source: Program, found: Optimization) -> Program:
    trainer = source.clone("trainer")
    trainer.attrs["role"] = "trainer"
    step, moved = trainer.blocks["step"], {id(op) for op in found.ops}
    step.ops = [mine for mine, op in zip(step.ops, source.blocks["step"].ops, strict=True) if id(op) not in moved]
    for name, op in found.updates.items():
        if op.operand("grad").name != grad_name(name):
            trainer.variables[name].attrs["grad"] = op.operand("grad")
    _prune(trainer)
    trainer.values = {
        n: v for n, v in trainer.values.items() if n in trainer.variables and trainer.variables[n].kind not in EVOLVING
    }
    return trainer


def _prune(program: Program) -> None:
    """Removes temporaries, constants and optimizer state that no op uses any more."""
    used = {n for b in program.blocks.values() for op in b.ops for n in (*op.reads, *op.writes)}
    program.variables = {
        n: v for n, v in program.variables.items() if n in used or v.kind not in (Kind.TEMP, Kind.CONST, Kind.STATE)
    }


def _declare_slice(program: Program, variable: Variable, s: Slice, found: Optimization) -> None:
    """The slice, its optimizer state, and its gradient."""
    assert variable.program is not None
    values = variable.program.values
    flat = Type(variable.dtype, (s.numel,))
    program.variable(s.name, flat, variable.kind, cut(values.get(variable.name), s))
    for state in found.state_of(variable) if variable.name in found.updates else ():
        if scalar_state(state, variable):
            program.variable(_state_name(state, s), state.type, Kind.STATE, values.get(state.name))
        else:
            program.variable(
                _state_name(state, s), Type(state.dtype, (s.numel,)), Kind.STATE, cut(values.get(state.name), s)
            )
    program.variable(grad_name(s.name), flat, Kind.INPUT)


def _state_name(state: Variable, s: Slice) -> str:
    return f"{s.name}@{state.name.removeprefix(f'{s.variable}@')}"


def cut(value: torch.Tensor | None, s: Slice) -> torch.Tensor | None:
    """The slice's elements; None for a program without values, which is rewritten for its text alone."""
    return None if value is None else value.detach().reshape(-1)[s.start : s.end].clone()


def _copy_variables(program: Program, source: Program, names: Iterable[str]) -> None:
    for name in names:
        if name not in program.variables:
            v = source.variables[name]
            program.variable(name, v.type, v.kind, source.values.get(name), **v.attrs)


def _norm_slices(source: Program, found: Optimization) -> list[Slice]:
    """The slices that the global norm is taken of, in canonical order."""
    norm = found.norm
    assert norm is not None
    parameter = {op.operand("grad").name: name for name, op in found.updates.items()}
    return [s for name in norm.reads for s in slices_of(source.variables[parameter[name]])]


def _runs(order: list[Slice], unit: int) -> tuple[tuple[int, int, int], ...]:
    """(shard, start, count) of the units of `order` among their shard's own, neighbours joined."""
    runs: list[tuple[int, int, int]] = []
    seen: dict[int, int] = {}
    for s in order:
        start, count = seen.get(s.shard, 0), -(-s.numel // unit)
        seen[s.shard] = start + count
        if runs and runs[-1][0] == s.shard:
            shard, first, before = runs.pop()
            runs.append((shard, first, before + count))
        else:
            runs.append((s.shard, start, count))
    return tuple(runs)


__all__ = ["ALL_NORMS", "SplitOptimizer", "cut"]
