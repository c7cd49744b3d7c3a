"""Has each contribution tell its loss and metrics to shard 0, which records those of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphft.capture.loss_results import reported
from graphft.ir import Operator, Ref
from graphft.transpiler.programs import Programs


@dataclass(frozen=True)
class ReportMetrics:
    """A trainer's `report_metrics` gives its values to the contribution: the last bucket for shard 0 takes them along.
    Shard 0 writes a row of the job's table for each step that it applies, so each step is there once, whatever dies,
    and whoever computed a batch."""

    name: ClassVar[str] = "report-metrics"

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        results, step = reported(job.trainer), job.trainer.blocks["step"]
        at = next(i for i, op in enumerate(step.ops) if op.type == "send_barrier")
        step.ops.insert(at, Operator("report_metrics", tuple(map(Ref, results))))
        job.pservers[0].blocks["serve"].ops[-1].attrs["metrics"] = ("loss", *results[1:])
        return job
