"""These passes have a step's loss and metrics checked, and told to shard 0."""

from __future__ import annotations

import torch

from graphft.capture.loss_fn import reported
from graphft.ir import Kind, Operator, Ref, Type
from graphft.transpiler.config import JobConfig
from graphft.transpiler.layout import SKIPPED_STEPS, gradient_of
from graphft.transpiler.programs import Programs, order_blocks


def check_finite(job: Programs, config: JobConfig) -> None:
    """A trainer checks the loss (`check_finite`, right behind the op that makes it) and the gradients, as it sends them
    (attribute `check` of `send`); `send_barrier` says what becomes of a contribution that is not finite.

    "skip": a pserver has a block `skip`, which counts what is left out in the state `%skipped_steps`. So the count is
    exact, whatever dies: it is in the checkpoints. "warn" changes nothing: the programs are those without any check.
    """
    if config.on_nonfinite == "warn":
        return
    step, loss = job.trainer.blocks["step"], str(job.trainer.attrs["loss"])
    gradients = {gradient_of(v) for v in job.trainer.of_kind(Kind.PARAM)}
    for op in step.ops:
        if op.type == "send" and gradients.intersection(op.reads):
            op.attrs["check"] = True
        elif op.type == "send_barrier":
            op.attrs["on_nonfinite"] = config.on_nonfinite
    made = max(i for i, op in enumerate(step.ops) if loss in op.writes)
    step.ops.insert(made + 1, Operator("check_finite", (Ref(loss),)))
    for program in job.pservers if config.on_nonfinite == "skip" else ():
        zero = torch.zeros((), dtype=torch.int64)
        count = program.variable(SKIPPED_STEPS, Type("int64", ()), Kind.STATE, zero)
        program.block("skip").append_op("increment", count.ref)
        program.blocks["serve"].ops[-1].attrs["skip_block"] = "skip"
        order_blocks(program, "init", "serve", "schedule", "reduce", "skip")


def report_metrics(job: Programs, config: JobConfig) -> None:
    """A trainer's `report_metrics` gives its loss and metrics to the contribution: the last bucket for shard 0 takes
    them along. Shard 0 writes a row of the job's table for each step that it applies, so each step is there once,
    whatever dies, and whoever computed a batch."""
    results, step = reported(job.trainer), job.trainer.blocks["step"]
    at = next(i for i, op in enumerate(step.ops) if op.type == "send_barrier")
    step.ops.insert(at, Operator("report_metrics", tuple(map(Ref, results))))
    job.pservers[0].blocks["serve"].ops[-1].attrs["metrics"] = ("loss", *results[1:])
