"""The state of a sync job at any step: from a checkpoint before, the steps in between are computed again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.checkpoint.store import Manifest
from graphft.runtime.checkpoint.stored_checkpoints import checkpoints_of
from graphft.runtime.process.metric_files import losses_of
from graphft.runtime.replay.batch import Computed, LocalTrainer
from graphft.runtime.replay.shards import LocalShards

if TYPE_CHECKING:
    from graphft.transpiler import Job


@dataclass(frozen=True)
class Reached:
    """How the state of `step` was reached: from the checkpoint in `folder` ("": the initial values) of step `start`.
    Of the losses in between, `same` are recorded in the job's metrics with the same bits; `other`: (step, slot, here,
    there) of those that are not."""

    step: int
    start: int
    folder: str
    same: int
    other: tuple[tuple[int, int, float, float], ...]


def newest_before(job: Job, job_dir: Path, step: int) -> Manifest | None:
    """The newest checkpoint of this run at or before `step`."""
    found = checkpoints_of(job_dir).manifests()
    return next((m for m in found if m.run == job.run_id and m.step <= step), None)


def reach(
    job: Job, job_dir: Path, shards: LocalShards, trainer: LocalTrainer, step: int, tell: Callable[[str], object]
) -> Reached:
    """Brings the shards to `step`. Raises UsageError where the job itself would not have got there."""
    manifest, start = newest_before(job, job_dir, step), 0
    if manifest is not None:
        store, start = checkpoints_of(job_dir), manifest.step
        shards.restore([store.read_part(manifest, i)[0] for i in range(job.config.pservers)])
    recorded = {(k, v): loss for k, v, loss in losses_of(job_dir)}
    same, other = 0, []
    for k in range(start, step):
        computed = {v: c for v in range(job.config.trainers) if (c := trainer.compute(k, v)) is not None}
        for v, c in computed.items():
            there = recorded.get((k, v), math.nan)
            if (k, v) in recorded and _differ(c.loss, there):
                other.append((k, v, c.loss, there))
            else:
                same += (k, v) in recorded
        _apply(job, shards, k, computed)
        tell(f"step {k} of {step}")
    return Reached(step, start, manifest.directory if manifest is not None else "", same, tuple(other))


def _apply(job: Job, shards: LocalShards, step: int, computed: dict[int, Computed]) -> None:
    bad = [v for v, c in computed.items() if not c.finite]
    if bad and job.config.on_nonfinite == "stop":
        raise UsageError(
            f"step {step} of slot {bad[0]} is not finite already: the job stops there",
            rule="replay",
            help=f"graphft replay --step {step} --slot {bad[0]}",
        )
    if bad:
        shards.leave_out()
    else:
        shards.apply({v: (c.work.samples, c.pushed) for v, c in computed.items()})


def _differ(one: float, other: float) -> bool:
    return one != other and not (math.isnan(one) and math.isnan(other))
