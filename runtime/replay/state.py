"""The state of a sync job at any step: from a checkpoint before, the steps in between are computed again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.checkpoint.manifest import Manifest, directory_key
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint
from graphft.runtime.process.metric_table import read_rows
from graphft.runtime.replay.batch import Computed, LocalTrainer
from graphft.runtime.replay.shards import LocalShards

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.transpiler import Job


log = logging.getLogger("graphft")


@dataclass(frozen=True)
class Reached:
    """Says how the state of `step` was reached: from the checkpoint in `folder` ("": the initial values) of step
    `start`. Of the steps in between, the losses of `same` are recorded in the job's metrics with the same bits;
    `other`: (step, here, there) of those that are not."""

    step: int
    start: int
    folder: str
    same: int
    other: tuple[tuple[int, float, float], ...]


def newest_before(job: Job, job_dir: Path, step: int) -> tuple[Manifest, list[dict[str, Tensor]]] | None:
    """The newest checkpoint of this run at or before `step` that is whole, and its parts; those that are damaged are
    told. Raises StorageUnavailable; UsageError where a state was loaded that no checkpoint has."""
    store = checkpoints_of(job_dir)
    for directory in (d for d in store.directories() if directory_key(d)[0] <= step):
        try:
            manifest = store.read_manifest(directory)
            if manifest.run == job.run_id:
                return manifest, [store.read_part(manifest, i)[0] for i in range(job.config.pservers)]
        except DamagedCheckpoint as error:
            if store.has_manifest(directory):  # else it is being written, or was given up
                log.error("%s; the steps since the one before it are computed again", error.message)
    if store.is_loaded(job.run_id):
        raise UsageError(
            f"a state was loaded in the place of the run's own, and no checkpoint at or before step {step} has it",
            rule="no-checkpoint",
            help="replay a step after a checkpoint that is there",
        )
    return None


def reach(
    job: Job, job_dir: Path, shards: LocalShards, trainer: LocalTrainer, step: int, tell: Callable[[str], object]
) -> Reached:
    """Brings the shards to `step`. Raises UsageError where the job itself would not have got there."""
    found, start, folder = newest_before(job, job_dir, step), 0, ""
    if found is not None:
        manifest, parts = found
        start, folder = manifest.step, manifest.directory
        shards.restore(parts)
    recorded = {k: values["loss"] for k, values in read_rows(job_dir, start, step - start).steps()}
    same, other = 0, []
    for k in range(start, step):
        computed = {v: c for v in range(job.config.trainers) if (c := trainer.compute(k, v)) is not None}
        if computed and k in recorded:
            here, there = _mean_loss(list(computed.values())), recorded[k]
            if _differ(here, there):
                other.append((k, here, there))
            else:
                same += 1
        _apply(job, shards, k, computed)
        tell(f"step {k} of {step}")
    return Reached(step, start, folder, same, tuple(other))


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


def _mean_loss(computed: Sequence[Computed]) -> float:
    """Over the samples of the slots, as shard 0 has it."""
    if len(computed) == 1:
        return computed[0].loss
    samples = sum(c.work.samples for c in computed)
    return sum(c.loss * c.work.samples for c in computed) / samples


def _differ(one: float, other: float) -> bool:
    return one != other and not (math.isnan(one) and math.isnan(other))
