"""Has training wait for validations, where it has to, and learning rates go down by what they decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from graphft.ir import Kind, Operator, Program, Ref, Type
from graphft.transpiler.programs import Programs

RATE_SCALE = "rate_scale"
"""State of each pserver: what the learning rates of its schedule are multiplied by."""


@dataclass(frozen=True)
class InsertDecisions:
    """A trainer's step begins with `etcd_await_validation`: where a validation decides how the job goes on, a step
    behind it waits until that is known; else it waits when too many are not over. With `scales`, each shard has
    %rate_scale, by which block `schedule` multiplies each learning rate; `listen_and_serv` sets it before the first
    step behind a validation. Checkpoints have it.
    """

    name: ClassVar[str] = "insert-decisions"
    every: int = 0
    scales: bool = False

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        attrs = {"every": self.every} if self.every else {"passes": True}
        job.trainer.blocks["step"].ops.insert(0, Operator("etcd_await_validation", (), attrs))
        for program in job.pservers if self.scales else ():
            self._scale(program)
        return job

    def _scale(self, program: Program) -> None:
        block = program.block("schedule")
        updates = [op for name, b in program.blocks.items() if name.startswith("optimize.") for op in b.ops]
        rates = dict.fromkeys(op.operand("lr").name for op in updates if _has_rate(op))
        scale = program.variable(RATE_SCALE, Type("float64", ()), Kind.STATE, torch.ones((), dtype=torch.float64))
        for rate in rates:
            base = program.fresh(f"{rate}_unscaled")
            program.variable(base, program.variables[rate].type)
            for op in block.ops:
                op.outputs = tuple(base if name == rate else name for name in op.outputs)
            block.ops.append(Operator("aten.mul.Tensor", (Ref(base), scale.ref), {}, (rate,)))
        program.blocks["serve"].ops[-1].attrs["scaled_rates"] = True


def _has_rate(op: Operator) -> bool:
    from graphft.ir import registry

    return any(slot.name == "lr" for slot in registry.require(op).slots)
