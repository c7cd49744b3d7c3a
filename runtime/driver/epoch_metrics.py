"""What an epoch was: each batch once, whatever was computed again. The same bits, whatever died."""

from __future__ import annotations

import time
from pathlib import Path

from graphft.loss_results import reported
from graphft.runtime.callbacks.epoch_sums import EpochSums
from graphft.runtime.coordination.records import PassMetrics
from graphft.runtime.driver.running_job import RunningJob
from graphft.runtime.launcher.process_ends import past_epoch
from graphft.runtime.launcher.tell import tell
from graphft.transpiler import Job
from graphft.transpiler.rates import rates_at

TOLD_SECONDS, LOOK_SECONDS = 10.0, 0.01
"""For how long what the first shard tells of a pass that is over is waited for; ..."""
START_SECONDS = 30.0
"""... and while the job starts."""


def tell_idle_rates(job: Job, epoch: int, told: set[str]) -> None:
    """A line, once, of each learning rate that was 0 in all of an epoch. `told`: of which there was one."""
    steps = job.config.plan.start_steps[epoch - 1 : epoch + 1]
    first, last = (rates_at(job.source, step) for step in (steps[0], steps[1] - 1))
    for name in sorted({n for n in last if first[n] == last[n] == 0} - told):
        told.add(name)
        where = f"epoch {epoch}, steps {steps[0]} to {steps[1] - 1}"
        tell(f"the learning rate %{name} was 0 in {where}: it changed nothing (is its schedule made for fewer steps?)")


def epoch_metrics(job: RunningJob, epoch: int) -> dict[str, float]:
    """The loss and each metric that `loss_fn` returned, means over the epoch's samples; how many `samples` these are,
    as the shards have summed them up; and how many of its records were `discarded`: they cannot be read, or their step
    was not finite. A line tells of these, and if etcd does not have any of it. Raises what has ended the job, if it is
    not told for that reason."""
    found = _told(job, epoch, TOLD_SECONDS)
    if found is None:
        job.check()  # what has ended it is the news; the next script tells of the epoch
    discarded = job.job.config.plan.samples - found.samples if found is not None else 0
    if discarded:
        tell(f"epoch {epoch + 1} DISCARDED {discarded} records: `graphft status --job {job.folder.path}` tells which")
    if found is None:
        tell(f"epoch {epoch + 1} is done, and etcd does not tell its metrics")
        found = PassMetrics(0, dict.fromkeys(reported(job.job.trainer_program()), "nan"))
    return _numbers(found) | {"discarded": discarded}


def _told(job: RunningJob, epoch: int, seconds: float) -> PassMetrics | None:
    end = time.monotonic() + seconds
    while (found := job.pass_metrics(epoch)) is None and time.monotonic() < end and job.alive:
        time.sleep(LOOK_SECONDS)
    return found


def _numbers(found: PassMetrics) -> dict[str, float]:
    return {name: float(mean) for name, mean in found.means.items()} | {"samples": found.samples}


def missed_epoch(job: Job, job_dir: Path, sums: EpochSums, running: RunningJob | None) -> dict[str, float]:
    """Of an epoch that was done while no script looked, with the same bits: of its rows, if none is missing; else as
    the shards have summed them up, if the job is `running` and etcd tells."""
    metrics = past_epoch(job.config, job_dir, sums)
    found = _told(running, sums.epoch - 1, START_SECONDS) if metrics["discarded"] and running is not None else None
    if found is not None:
        metrics |= _numbers(found) | {"discarded": job.config.plan.samples - found.samples}
    elif sums.lacking:
        tell(f"of epoch {sums.epoch}, {sums.lacking} rows are not in {job_dir / 'metrics'}: it is told without them")
    return metrics
