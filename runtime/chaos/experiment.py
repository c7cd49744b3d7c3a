"""`graphft chaos`: the job that is to suffer, the run that it is compared with, and the comparison."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from graphft.errors import GraphftError
from graphft.runtime.chaos.faults import kinds_of, make_schedule
from graphft.runtime.chaos.run import ChaosOptions, Report, Run
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.store import CheckpointStore, checkpoints_of
from graphft.runtime.coordination.result_files import read_validations
from graphft.runtime.coordination.runs import find_folder
from graphft.runtime.process.metric_table import read_rows
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK
from graphft.runtime.protocol.ledger import ALL, Ledger
from graphft.runtime.validation.best_model import BestModels
from graphft.transpiler.job import Job
from graphft.transpiler.record import read_record

MODEL = "model.safetensors"
SAVED = ("job.json", "source", "programs", "data", "validation", "prediction")
"""A folder holds these of the job itself, not of any run."""


def chaos(options: argparse.Namespace) -> int:
    """Carries `graphft chaos` out. Returns its exit status."""
    if bool(options.job) == bool(options.script):
        raise GraphftError("which job?", rule="usage", help="give a script, or --job DIR of a saved job")
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    kinds = tuple(k for k in options.kinds.split(",") if k)
    kinds_of(kinds, True)  # refuses unknown ones before anything runs
    chosen = ChaosOptions(options.faults, options.seed, kinds, options.patience)
    name = Path(options.job or options.script).resolve().name.removesuffix(".py")
    work = Path(options.dir or f"jobs/{name}-chaos-{options.seed}")
    source = find_folder(options.job) if options.job else work / "job"
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


# -- what two runs left ------------------------------------------------------------------------------------------------


def final_state(job: Job, folder: Path) -> dict[str, Tensor]:
    """Returns every tensor of the final checkpoint (parameters, buffers, optimizer state) and of the exported model;
    the means of each validation, and which model was the best by them. Raises GraphftError when the job is not
    complete, or the checkpoint is damaged."""
    store = checkpoints_of(folder)
    last = _last(job, store, folder)
    state = {f"model: {name}": value for name, value in load_file(folder / MODEL).items()}
    for shard in range(job.config.pservers):
        state |= {f"shard {shard}: {name}": value for name, value in store.read_part(last, shard)[0].items()}
    for step, row in read_validations(folder).items():
        state |= {
            f"validation of step {step}: {n}": torch.tensor(v, dtype=torch.float64) for n, v in row.metrics.items()
        }
    validate = job.config.validate
    if validate is not None and validate.best is not None:
        kept = BestModels(folder, validate.best.mode or "min").best()
        state["step of the best model"] = torch.tensor(-1 if kept is None else kept.step)
    return state


def metric_differences(reference: Path, folder: Path) -> list[str]:
    """Compares the metrics tables in two folders: returns which steps differ, in words."""
    one, other = (read_rows(path).data for path in (reference, folder))
    count = min(len(one), len(other))
    bits = [np.ascontiguousarray(rows["values"][:count]).view(np.int64) for rows in (one, other)]
    differs = (one["samples"][:count] != other["samples"][:count]) | (bits[0] != bits[1]).any(1)
    lengths = [f"its table of metrics has {len(other)} steps, the reference's {len(one)}"] * (len(one) != len(other))
    return [*lengths, *(f"metrics of step {step}: differ" for step in np.flatnonzero(differs))]


def _last(job: Job, store: CheckpointStore, folder: Path) -> Manifest:
    """Returns the newest manifest of the complete run in this folder, which may have been stopped early."""
    run = read_record(folder).run_id
    last = next((m for m in store.manifests() if m.run == run), None)
    if last is None or not (folder / MODEL).exists():
        raise GraphftError(
            f"{folder} holds no complete run of this job", rule="chaos-reference", help="run the job to its end first"
        )
    return last


def last_step(job: Job, folder: Path) -> int:
    """Returns after how many steps the complete run of this folder ended; fewer than planned if it stopped early."""
    return _last(job, checkpoints_of(folder), folder).step


def differences(reference: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Returns what is not identical, in words. NaNs are equal when their bits are."""
    result = [
        f"{name}: only in {'the reference' if name in reference else 'this run'}"
        for name in sorted(reference.keys() ^ found.keys())
    ]
    for name in sorted(reference.keys() & found.keys()):
        one, other = reference[name], found[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            result.append(f"{name}: {one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}")
            continue
        bits = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (one, other)]  # [elements, bytes]
        if differing := int((bits[0] != bits[1]).any(-1).sum()):
            result.append(f"{name}: {differing} of {one.numel()} elements differ")
    return result


def not_once(job: Job, folder: Path) -> list[str]:
    """Async: the batches that a shard has not applied exactly once, in words.

    A shard's ledger holds what it has applied, and its version counts how often it has applied anything: when the
    ledger holds every batch and the version is their number, each was applied once.
    """
    batches = job.config.plan.batches
    expected = [(p, c) for p in range(job.config.epochs) for c, count in enumerate(batches) if count]
    store = checkpoints_of(folder)
    last = _last(job, store, folder)
    found = []
    for shard, version in enumerate(last.meta["versions"]):
        ledger = Ledger.load(json.loads(store.read_part(last, shard)[1]))
        lacking = [(p, c) for p, c in expected if ledger.ranges(p, c) != [(0, ALL)]]
        found += [
            f"shard {shard}: chunk {c} of pass {p} is applied in {ledger.ranges(p, c)} of {batches[c]} batches"
            for p, c in lacking
        ]
        applied = sum(int(batches[c]) for _, c in expected)
        if not lacking and version != applied:
            found.append(f"shard {shard} has applied {version} times what are {applied} batches")
    return found
