"""Leaves what evolves the parameters with the trainers; the shards that own them add up what it did there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphft.errors import ProgramError
from graphft.ir import Kind, Program, Ref, Type, Variable, grad_name
from graphft.optim.training import GLOBAL_STEP
from graphft.transpiler.layout import EVOLVING, Slice, all_slices
from graphft.transpiler.optimization import Optimization, find_optimization
from graphft.transpiler.passes.split_optimizer import cut
from graphft.transpiler.programs import Programs


@dataclass(frozen=True)
class KeepOptimizer:
    """In the place of `split-optimizer`, for mode geo_sgd: makes a program per pserver, starts the coordinator's.

    The trainer's step stays whole; its optimizer state is each trainer's own. A pserver has the slices s that it owns,
    the input `s@GRAD`, which is by how much a trainer moved its copy of the slice, and a block `optimize.<s>` that
    applies 1 / `trainers` of it; `assign(s, s@GRAD)` for a buffer.
    """

    name: ClassVar[str] = "keep-optimizer"
    shards: int = 1
    trainers: int = 1

    def run(self, job: Programs) -> Programs:
        source = job.trainer
        _check_counters(source, find_optimization(source.blocks["step"]))
        pservers = tuple(self._pserver(source, shard) for shard in range(self.shards))
        coordinator = Program("coordinator", {"role": "coordinator"})
        return Programs(_trainer(source), pservers, coordinator, job.evaluation)

    def _pserver(self, source: Program, shard: int) -> Program:
        program = Program(f"pserver{shard}", {"role": "pserver", "index": shard})
        for s in all_slices(source):
            if s.shard == shard:
                self._serve(program, source.variables[s.variable], s, source)
        return program

    def _serve(self, program: Program, variable: Variable, s: Slice, source: Program) -> None:
        flat = Type(variable.dtype, (s.numel,))
        program.variable(s.name, flat, variable.kind, cut(source.values.get(variable.name), s))
        program.variable(grad_name(s.name), flat, Kind.INPUT)
        block, operands = program.block(f"optimize.{s.name}"), (Ref(s.name), Ref(grad_name(s.name)))
        if variable.kind is Kind.PARAM:
            block.append_op("apply_delta", *operands, scale=1 / self.trainers)
        else:
            block.append_op("assign", *operands)


def _check_counters(source: Program, found: Optimization) -> None:
    """The one counter that all trainers can agree on is %global_step."""
    own = {state.name for name in found.updates for state in found.state_of(source.variables[name])}
    for v in source.of_kind(Kind.STATE):
        if v.name not in own and v.name != GLOBAL_STEP:
            raise ProgramError(
                f"state %{v.name} belongs to no parameter: each trainer would have its own",
                block=source.blocks["step"],
                rule="local-state",
                help=f"let the schedule depend on %{GLOBAL_STEP} alone, or use another mode",
            )


def _trainer(source: Program) -> Program:
    trainer = source.clone("trainer")
    trainer.attrs["role"] = "trainer"
    for op in find_optimization(trainer.blocks["step"]).updates.values():
        parameter, gradient = op.operand("param").name, op.operand("grad")
        if gradient.name != grad_name(parameter):
            trainer.variables[parameter].attrs["grad"] = gradient
    trainer.values = {n: v for n, v in trainer.values.items() if trainer.variables[n].kind not in EVOLVING}
    return trainer
