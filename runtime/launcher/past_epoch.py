"""What `on_epoch` is told of an epoch of which nobody waits for the end: as its rows and the folder tell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.callbacks.epoch_sums import EpochSums
from graphft.runtime.launcher.process_ends import count_ends

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig


def past_epoch(config: JobConfig, job_dir: Path, sums: EpochSums) -> dict[str, float]:
    """As `train()` returns it. `left_out`: records without a row; `seconds`: from its first row to its last one, in
    which the `failures` and `preemptions` were."""
    metrics: dict[str, float] = {"epoch": sums.epoch, **sums.means, "samples": sums.samples}
    metrics |= {"left_out": config.plan.samples - sums.samples, "steps": sums.steps, "seconds": sums.seconds}
    failures, preemptions = count_ends(job_dir, sums.first_at, sums.last_at)
    return metrics | {"failures": failures, "preemptions": preemptions}
