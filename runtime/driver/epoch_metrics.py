"""What an epoch was: each batch once, whatever was computed again. The same bits, whatever died."""

from __future__ import annotations

import time

from graphft.loss_results import reported
from graphft.runtime.coordination.records import PassMetrics
from graphft.runtime.driver.running_job import RunningJob
from graphft.runtime.launcher.tell import tell
from graphft.transpiler import Job
from graphft.transpiler.rates import rates_at

TOLD_SECONDS, LOOK_SECONDS = 10.0, 0.01
"""For how long what the first shard tells of a pass that is over is waited for."""


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
    as the shards have summed them up; and how many of its records were `left_out`: they cannot be read, or their step
    was not finite. A line tells of these, and if etcd does not have any of it."""
    end = time.monotonic() + TOLD_SECONDS
    while (found := job.pass_metrics(epoch)) is None and time.monotonic() < end and job.alive:
        time.sleep(LOOK_SECONDS)
    left_out = job.job.config.plan.samples - found.samples if found is not None else 0
    if left_out:
        tell(f"epoch {epoch + 1} LEFT OUT {left_out} records: `graphft status --job {job.folder.path}` tells which")
    if found is None:
        tell(f"epoch {epoch + 1} is done, and etcd does not tell its metrics")
        found = PassMetrics(0, dict.fromkeys(reported(job.job.trainer_program()), "nan"))
    return {name: float(mean) for name, mean in found.means.items()} | {"samples": found.samples, "left_out": left_out}
