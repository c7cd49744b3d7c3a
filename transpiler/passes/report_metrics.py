"""Has the shards sum up what a pass comes to: its loss, and the metrics that `loss_fn` returns beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphft.ir import Kind, Operator, Ref, Type
from graphft.loss_results import reported
from graphft.transpiler.programs import Programs

PASS_METRICS = "pass_metrics"
"""State of each pserver: samples of the pass at hand, and the sum over them of each value that is reported."""


@dataclass(frozen=True)
class ReportMetrics:
    """A trainer's `report_metrics` gives its values to the contribution, whose last bucket for each shard takes them
    along. A shard adds those of the steps that it applies to the state `%pass_metrics`, which its checkpoints have: so
    they are exact, whatever dies, and whoever computed a batch.
    """

    name: ClassVar[str] = "report-metrics"

    def run(self, job: Programs) -> Programs:
        import torch

        job = job.clone()
        names, step = reported(job.trainer), job.trainer.blocks["step"]
        at = next(i for i, op in enumerate(step.ops) if op.type == "send_barrier")
        step.ops.insert(at, Operator("report_metrics", tuple(map(Ref, names))))
        for program in job.pservers:
            size = 1 + len(names)
            program.variable(PASS_METRICS, Type("float64", (size,)), Kind.STATE, torch.zeros(size, dtype=torch.float64))
            program.blocks["serve"].ops[-1].attrs["metrics"] = names
        return job
