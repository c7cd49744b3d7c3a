"""What an epoch was: each batch once, whatever was computed again. The same bits, whatever died."""

from __future__ import annotations

import time
from pathlib import Path

from graphft.capture.loss_results import reported
from graphft.runtime.coordination.epoch_metrics import epoch_of_table
from graphft.runtime.coordination.records import PassMetrics
from graphft.runtime.driver.running_job import RunningJob
from graphft.runtime.launcher.process_ends import discarded_in, past_epoch
from graphft.runtime.launcher.tell import tell
from graphft.transpiler import Job
from graphft.transpiler.optimization import rates_at

TOLD_SECONDS, LOOK_SECONDS = 10.0, 0.01
"""For how long what the first shard records of a pass that is over is waited for; ..."""
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
    """The loss and each metric that `loss_fn` returned, means over the epoch's samples; how many `samples` these are;
    and how many of its records were `discarded`: they cannot be read, or their step was not finite. A line tells of
    these, and if etcd does not have any of it. Raises what has ended the job, if it is not told for that reason."""
    found = _recorded(job, epoch, TOLD_SECONDS)
    if found is None:
        job.check()  # what has ended it is the news; the next script tells of the epoch
        tell(f"epoch {epoch + 1} is done, and etcd does not tell its metrics")
        found = PassMetrics(0, dict.fromkeys(reported(job.job.trainer_program()), "nan"))
        return found.numbers() | {"discarded": 0}
    count = discarded_in(job.job.config, epoch + 1, found)
    if count:
        tell(f"epoch {epoch + 1} DISCARDED {count} records: `graphft status --job {job.folder.path}` tells which")
    return found.numbers() | {"discarded": count}


def _recorded(job: RunningJob, epoch: int, seconds: float) -> PassMetrics | None:
    end = time.monotonic() + seconds
    while (found := job.pass_metrics(epoch)) is None and time.monotonic() < end and job.alive:
        time.sleep(LOOK_SECONDS)
    return found


def missed_epoch(job: Job, job_dir: Path, epoch: int, running: RunningJob | None) -> dict[str, float]:
    """Returns the metrics of an epoch (from 1) that was done while no script looked, with the same bits: as the table
    here has it; where that lacks rows and the job is `running`, as etcd tells."""
    found = epoch_of_table(job_dir, job.config, epoch - 1)
    if found.lacking and running is not None:
        found = _recorded(running, epoch - 1, START_SECONDS) or found
    return past_epoch(job.config, job_dir, epoch, found)
