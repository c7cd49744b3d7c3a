"""What a loss or gradient that is not finite (an infinity, or no number) does to the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from graphft.ir import Kind, Operator, Program, Ref, Type
from graphft.transpiler.layout import gradient_of
from graphft.transpiler.programs import Programs, order_blocks

SKIPPED_STEPS = "skipped_steps"
"""State of each pserver: how many steps (async: batches, or units) were left out."""


@dataclass(frozen=True)
class CheckFinite:
    """A trainer checks the loss (`check_finite`, right behind the op that makes it) and the gradients, as it sends them
    (attribute `check` of `send`); `send_barrier` says what becomes of a contribution that is not finite.

    "skip": a pserver has a block `skip`, which counts what is left out in the state `%skipped_steps`. So the count is
    exact, whatever dies: it is in the checkpoints. "warn" changes nothing: the programs are those without any check.
    """

    name: ClassVar[str] = "check-finite"
    on_nonfinite: Literal["stop", "skip", "warn"] = "stop"

    def run(self, job: Programs) -> Programs:
        if self.on_nonfinite == "warn":
            return job
        job = job.clone()
        self._check(job.trainer)
        for program in job.pservers if self.on_nonfinite == "skip" else ():
            _count_skipped(program)
        return job

    def _check(self, trainer: Program) -> None:
        step, loss = trainer.blocks["step"], str(trainer.attrs["loss"])
        gradients = {gradient_of(v) for v in trainer.of_kind(Kind.PARAM)}
        for op in step.ops:
            if op.type == "send" and gradients.intersection(op.reads):
                op.attrs["check"] = True
            elif op.type == "send_barrier":
                op.attrs["on_nonfinite"] = self.on_nonfinite
        made = max(i for i, op in enumerate(step.ops) if loss in op.writes)
        step.ops.insert(made + 1, Operator("check_finite", (Ref(loss),)))


def _count_skipped(program: Program) -> None:
    import torch

    count = program.variable(SKIPPED_STEPS, Type("int64", ()), Kind.STATE, torch.zeros((), dtype=torch.int64))
    program.block("skip").append_op("increment", count.ref)
    program.blocks["serve"].ops[-1].attrs["skip_block"] = "skip"
    order_blocks(program, "init", "serve", "schedule", "reduce", "skip")
