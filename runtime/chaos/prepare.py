"""The job that is to suffer, the run that it is compared with, and the comparison."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphft.errors import GraphftError
from graphft.runtime.chaos.compare import MODEL, differences, final_state, last_step, metric_differences, not_once
from graphft.runtime.chaos.fault_schedule import kinds_of, make_schedule
from graphft.runtime.chaos.report import Report
from graphft.runtime.chaos.run import ChaosOptions, Run, Say
from graphft.transpiler import Job

SAVED = ("job.json", "source", "programs", "data", "validation", "prediction")


@dataclass(frozen=True, slots=True)
class Prepared:
    """`folder` holds the job and nothing of any run; `seconds`: of the reference run, None when it was there."""

    job: Job
    folder: Path
    reference: Path
    seconds: float | None = None

    @property
    def steps(self) -> int:
        """How many the job has: those of the reference run, which may have stopped early."""
        config = self.job.config
        return last_step(self.job, self.reference) if config.sync else config.total_steps


def save_script(script: str, arguments: Sequence[str], folder: Path) -> None:
    """Runs a script up to its `job.run()`, and saves the job. Raises GraphftError when it does not get there."""
    command = [sys.executable, "-m", "graphft", "launch", "--save-only", "--job", str(folder), script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not (folder / "job.json").exists():
        raise GraphftError(
            f"{script} made no job (exit status {done.returncode}):\n{done.stderr[-2000:]}",
            rule="chaos-script",
            help="the script is to call job.run()",
        )


def prepare(source: Path, work: Path, patience: float) -> Prepared:
    """Copies the job of `source` into `work`/chaos; runs it undisturbed in `work`/reference, unless `source` is a
    complete run itself. An async job has no such reference: its ledgers are looked at."""
    job = Job.load(source)
    if job.trainer_program().find_op("etcd_keep_alive") is None:
        raise GraphftError(
            "this job was made without fault tolerance",
            rule="chaos-ft",
            help="transpile it with ft=True: without it, the first fault ends the job",
        )
    chaos, reference = work / "chaos", work / "reference"
    for folder in (chaos, reference):
        if folder.exists():
            raise GraphftError(
                f"{folder} is there already", rule="chaos-folder", help="delete it, or give another --dir"
            )
    copy_job(source, chaos)
    if not job.config.sync or (source / MODEL).exists():
        return Prepared(job, chaos, source)
    return Prepared(job, chaos, reference, _run_undisturbed(job, source, reference, patience))


def _run_undisturbed(job: Job, source: Path, folder: Path, patience: float) -> float:
    """Returns the seconds that it took."""
    copy_job(source, folder)
    report = Run(job, folder, ChaosOptions(faults=0, patience=patience), [], lambda line: None).play()
    if not report.completed:
        raise GraphftError(
            f"the undisturbed run failed: {report.problem}",
            rule="job-failed",
            help=f"its logs are in {folder / 'logs'}",
        )
    return report.seconds


def copy_job(source: Path, target: Path) -> None:
    """The job of a folder without anything of its runs."""
    shutil.copytree(
        source, target, ignore=lambda path, names: [n for n in names if Path(path) == source and n not in SAVED]
    )


def run_chaos(prepared: Prepared, options: ChaosOptions, say: Say) -> Report:
    """Runs the job under faults, and compares what it leaves with the reference."""
    job, steps = prepared.job, prepared.steps
    kinds = kinds_of(options.kinds, options.members, job.config.dispatch == "coordinator")
    schedule = make_schedule(options.seed, options.faults, kinds, steps, job.config.lease_ttl)
    report = Run(job, prepared.folder, options, schedule, say, steps).play()
    report.reference_seconds = prepared.seconds
    if report.completed and not job.config.sync:
        report.different = not_once(job, prepared.folder)
        report.exactly_once = not report.different
    elif report.completed:
        expected, found = final_state(job, prepared.reference), final_state(job, prepared.folder)
        report.metrics_compared, metrics = metric_differences(prepared.reference, prepared.folder)
        report.different = [*differences(expected, found), *metrics]
        report.identical, report.compared = not report.different, len(expected)
    return report
