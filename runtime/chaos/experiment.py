"""`graphft chaos`: the job that is to suffer, the run that it is compared with, and the comparison."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from graphft.errors import GraphftError
from graphft.runtime.chaos.compare import MODEL, differences, final_state, last_step, metric_differences, not_once
from graphft.runtime.chaos.faults import kinds_of, make_schedule
from graphft.runtime.chaos.run import ChaosOptions, Report, Run
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK
from graphft.transpiler import Job

SAVED = ("job.json", "source", "programs", "data", "validation", "prediction")
"""A folder holds these of the job itself, not of any run."""


def chaos(options: argparse.Namespace) -> int:
    """Carries `graphft chaos` out. Returns its exit status."""
    if bool(options.job) == bool(options.script):
        raise GraphftError("which job?", rule="usage", help="give a script, or --job DIR of a saved job")
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    kinds = tuple(k for k in options.kinds.split(",") if k)
    chosen = ChaosOptions(options.faults, options.seed, kinds, options.patience)
    name = Path(options.job or options.script).resolve().name.removesuffix(".py")
    work = Path(options.dir or f"jobs/{name}-chaos-{options.seed}")
    source = Path(options.job or work / "job")
    if options.script:
        save_script(options.script, options.args, source)
    report = run_chaos(prepare(source, work, options.patience), chosen, console.print)
    console.print(report.render())
    if report.ok and not options.keep:
        shutil.rmtree(work)
    else:
        console.print(f"the runs are in {work}")
    return EXIT_OK if report.ok else EXIT_FAILED


@dataclass(frozen=True, slots=True)
class Prepared:
    """`folder` holds the job and nothing of any run; `reference` the undisturbed run of a sync job."""

    job: Job
    folder: Path
    reference: Path


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
    _copy_job(source, chaos)
    if not job.config.sync or (source / MODEL).exists():
        return Prepared(job, chaos, source)
    _copy_job(source, reference)
    report = Run(job, reference, ChaosOptions(faults=0, patience=patience)).play()
    if not report.completed:
        logs = reference / "logs"
        raise GraphftError(
            f"the undisturbed run failed: {report.problem}", rule="job-failed", help=f"its logs are in {logs}"
        )
    return Prepared(job, chaos, reference)


def _copy_job(source: Path, target: Path) -> None:
    shutil.copytree(
        source, target, ignore=lambda path, names: [n for n in names if Path(path) == source and n not in SAVED]
    )


def run_chaos(prepared: Prepared, options: ChaosOptions, say: Callable[[str], object]) -> Report:
    """Runs the job under faults, and compares what it leaves with the reference."""
    job = prepared.job
    steps = last_step(job, prepared.reference) if job.config.sync else job.config.total_steps  # it may stop early
    kinds = kinds_of(options.kinds, job.config.dispatch == "coordinator")
    schedule = make_schedule(options.seed, options.faults, kinds, steps, job.config.lease_ttl)
    report = Run(job, prepared.folder, options, schedule, say, steps).play()
    if not report.completed:
        return report
    if not job.config.sync:
        report.promise, report.different = "exactly once", not_once(job, prepared.folder)
    else:
        expected, found = final_state(job, prepared.reference), final_state(job, prepared.folder)
        report.different = [*differences(expected, found), *metric_differences(prepared.reference, prepared.folder)]
        report.promise, report.compared = "bit-identical", len(expected)
    return report
