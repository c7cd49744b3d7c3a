"""Compensates gradients for their delay (mode dc_asgd)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from graphft.ir import Kind, Operator, Program, Variable, backup_name, grad_name
from graphft.ir.literals import dtype_of
from graphft.transpiler.programs import Programs


@dataclass(frozen=True)
class CompensateDelay:
    """A pserver compensates each parameter's gradient by `dc_asgd`, before anything else sees it: at the head of the
    slice's optimize block, or of block `reduce` where the global norm is taken, so that what is clipped is compensated.

    `s@BACKUP`, an input, is slice s as it was when the gradient was computed. With `decay` there is one more state,
    `s@mean_square`.
    """

    name: ClassVar[str] = "compensate-delay"
    strength: float = 0.04
    decay: float = 0.0

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        for program in job.pservers:
            reduced = program.blocks.get("reduce")
            ahead: dict[str, list[Operator]] = {}
            for s in program.of_kind(Kind.PARAM):
                in_norm = reduced is not None and any(grad_name(s.name) in op.reads for op in reduced.ops)
                ahead.setdefault("reduce" if in_norm else f"optimize.{s.name}", []).append(self._op(program, s))
            for name, ops in ahead.items():
                program.blocks[name].ops[:0] = ops
        return job

    def _op(self, program: Program, s: Variable) -> Operator:
        backup = program.variable(backup_name(s.name), s.type, Kind.INPUT)
        operands = [program.variables[grad_name(s.name)].ref, s.ref, backup.ref]
        if self.decay:
            zeros = torch.zeros([int(d) for d in s.shape], dtype=dtype_of(s.type))
            operands.append(program.variable(f"{s.name}@mean_square", s.type, Kind.STATE, zeros).ref)
        return Operator("dc_asgd", tuple(operands), {"strength": self.strength, "decay": self.decay})
