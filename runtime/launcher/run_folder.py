"""Finds the run that a job is run in: the newest one of its name if that is the same job, else the next one.

The newest run of the same job goes on if it is unfinished; if it is complete, its result is the job's. Code, options,
data and seeded initial values make a job the same. More epochs and other numbers of pservers are no difference: the
run goes on from its newest checkpoint, in the next folder, with what people are shown of it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import GraphftError, UsageError
from graphft.runtime.callbacks.runner import CURSOR, Cursor
from graphft.runtime.checkpoint.store import saved_step
from graphft.runtime.coordination.job_files import (
    JOBS,
    fetch,
    has_remote_checkpoints,
    is_complete,
    publish,
    stored_run,
    url_of,
)
from graphft.runtime.coordination.result_files import VALIDATIONS
from graphft.runtime.coordination.runs import copy_of, link_newest, run_at, run_in, run_numbers
from graphft.runtime.launcher.process_ends import FILE as ENDS
from graphft.runtime.launcher.process_ends import lost_checkpoints
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.metric_table import FILE as METRICS
from graphft.transpiler.record import read_record

if TYPE_CHECKING:  # what tells two jobs apart needs torch, which most commands do without
    from graphft.transpiler.config import JobConfig
    from graphft.transpiler.job import Job

_TRACES, _BATCH_LOGS = ("etcd.json", "etcd", "checkpoints"), "slurm-"
"""A run that was begun has such files in its folder, beside its logs; logs of Slurm's begin before a run does."""
_ANEW = "fresh=True or --fresh begins another"


@dataclass(frozen=True)
class RunFolder:
    """The folder that a job is run in. `before`: how the newest run differs, if this is the next one; `carried`: what
    of that it goes on with."""

    path: Path
    complete: bool = False
    before: str = ""
    carried: str = ""

    def describe(self, config: JobConfig) -> str:
        """Returns the first line that a launcher prints."""
        return "; ".join(filter(None, (self.before, self._here(config))))

    def _here(self, config: JobConfig) -> str:
        if self.complete:
            return f"{self.path} is complete, and its result is returned: {_ANEW}"
        if self.carried:
            return f"going on {self.carried} in {self.path}"
        if not begun(self.path):
            return f"new run in {self.path}" + (f", storage {url}" if (url := url_of(self.path)) else "")
        if not config.ft:
            return f"beginning {self.path} anew: without fault tolerance (ft=False) no run can be resumed"
        step = saved_step(self.path, config)
        return f"resuming {self.path} at step {'?' if step is None else step}{config.of_steps}"


@dataclass(frozen=True)
class _Found:
    """The newest run, compared with a job. `differs`: in words; "" if it is the same job. `layout`: True if it differs
    in its number of pservers or epochs alone, and can be gone on with."""

    differs: str = ""
    layout: bool = False
    complete: bool = False


def begun(path: Path) -> bool:
    """Returns True if a process of the run in this folder was ever started. Raises GraphftError[storage]."""
    logs = any(not log.name.startswith(_BATCH_LOGS) for log in (path / "logs").glob("*.log"))
    return logs or any((path / name).exists() for name in _TRACES) or has_remote_checkpoints(path)


def open_run(job: Job, wanted: str = "", *, fresh: bool = False) -> RunFolder:
    """Returns the folder in which `job` is to be run; a new one is saved there. `wanted`: this and no other. `fresh`:
    no run that was begun. Raises UsageError if that cannot be, with what differs; GraphftError where a folder cannot be
    read."""
    while True:
        number, path, copied = _newest(job, wanted)
        if copied and not wanted and (name := read_record(path).config.name) != job.config.name:
            shutil.rmtree(path)
            raise UsageError(
                f"{job.config.storage} has the runs of job {name}, and this one is {job.config.name}",
                rule="job-directory",
                help="give each job a storage of its own",
            )
        there = path.is_dir() and any(path.iterdir()) if number or wanted else False
        found = _compare(_with_storage(job, number), path) if there else _Found(f"{path} does not exist")
        if there and not found.differs and not (fresh and begun(path)):
            if job.prediction is not None:
                job.save_prediction(path)
            publish(path)
            link_newest(path)
            return RunFolder(path, found.complete)
        if wanted and there:
            if copied:
                shutil.rmtree(path)
            raise UsageError(
                f"{path} {found.differs or 'was begun'}",
                rule="job-directory",
                help="choose another directory, or delete this one; without one the next run has a folder of its own",
            )
        if (begins := _begin(job, wanted, number, path, found, fresh)) is not None:
            return begins


def _begin(job: Job, wanted: str, number: int, newest: Path, found: _Found, fresh: bool) -> RunFolder | None:
    """Begins the next run; None if another script has just begun one."""
    number += not wanted
    path = Path(wanted or run_at(str(JOBS / job.config.name), number))
    job, carried = job if wanted else _with_storage(job, number), ""

    def prepare(new: Path) -> None:
        nonlocal carried
        if found.layout and not fresh:
            carried = _carry(newest, job, new)

    begins = not (path / "job.json").exists()
    try:
        job.save(path, prepare)
        publish(path)
    except GraphftError as error:
        if wanted or error.rule != "job-directory":
            raise
        if begins and (path / "job.json").exists() and read_record(path).run_id == job.run_id:
            shutil.rmtree(path)  # another machine has just taken the storage
        return None
    link_newest(path)
    held = found.differs or ("is complete" if found.complete else "is unfinished")
    before = f"{newest} {held}" if number > 1 else ""
    return RunFolder(path, before=before, carried=carried)


def _newest(job: Job, wanted: str) -> tuple[int, Path, bool]:
    """Returns the number of the newest run, its folder, and True if that was copied from the storage just now. 0: there
    is none, or one is `wanted`."""
    url, top = job.config.storage, str(JOBS / job.config.name)
    if wanted:
        return 0, Path(wanted), _copy(url, Path(wanted))
    stored = (n for n in reversed(run_numbers(url)) if stored_run(run_at(url, n))) if url else iter(())
    number = max(next(stored, 0), max(run_numbers(top), default=0))
    path = Path(run_at(top, number))
    return number, path, bool(number) and _copy(_with_storage(job, number).config.storage, path)


def _copy(url: str, path: Path) -> bool:
    """Makes the folder a copy of what the storage holds, if it is empty. Returns whether it did."""
    if not url or ((path / "job.json").exists() and url_of(path) != url):
        return False
    return bool(stored_run(url)) and fetch(url, path)


def _with_storage(job: Job, number: int) -> Job:
    """The job of this number, whose storage is below that of the script's; 0: the script's itself."""
    url = job.config.storage
    return replace(job, config=job.config.replace(storage=run_at(url, number))) if url and number else job


def _compare(job: Job, path: Path) -> _Found:
    from graphft.runtime.checkpoint.reshard import layout_differences
    from graphft.transpiler.differences import differences, drawn

    try:
        saved = read_record(path)
    except GraphftError as error:
        if error.rule == "storage":  # it may be this very job, and is not to be begun anew elsewhere
            raise
        return _Found(f"holds something else ({error.message})")
    complete, more = is_complete(path), job.config.epochs > saved.config.epochs
    changed = differences(path, saved, job, drawn(saved, job))
    layout = layout_differences(job, path) if changed else []
    if not changed or (complete and layout and not more):
        return _Found(complete=complete)
    if not layout or not begun(path):
        return _Found(f"differs in: {', '.join(changed)}")
    lost = lost_checkpoints(path, step := saved_step(path, saved.config))
    if lost:
        raise GraphftError(
            f"the run in {path} is to be gone on with, and its checkpoints {lost}",
            rule="storage" if step is None else "checkpoint",
            help=f"bring them back; {_ANEW}",
        )
    return _Found(f"differs in: {', '.join(layout)}" + ", and has no checkpoint to go on from" * (not step), bool(step))


def _carry(source: Path, job: Job, new: Path) -> str:
    """Takes along the newest checkpoint of the run in `source`, and what people are shown of it: one curve, one log.
    Returns what that is, in words. Raises UsageError[job-running] while a launcher is at work there."""
    from graphft.runtime.checkpoint.reshard import carry_over
    from graphft.runtime.validation.best_model import BestModels

    with locked(source):
        step = carry_over(source, job, new)
    for name in (METRICS, VALIDATIONS, ENDS, *(path.name for path in source.glob("*.csv"))):
        if (source / name).exists():
            shutil.copyfile(source / name, new / name)
    if (source / CURSOR).exists():
        told = Cursor.read(source, read_record(source).run_id)
        replace(told, run=job.run_id).write(new)
    best = job.config.validate.best if job.config.validate is not None else None
    if best is not None and (source / "best").exists():
        BestModels(new, best.mode or "min").adopt(BestModels(source, best.mode or "min"))
    counts = f"{job.config.epochs} epochs, {job.config.pservers} pserver{'s' * (job.config.pservers > 1)}"
    return f"from step {step}{job.config.of_steps} of {source}, with {counts},"


def saved_run(path: Path, *, fresh: bool) -> RunFolder:
    """Returns the run in a folder, that is launched without its script. Raises UsageError for `fresh`."""
    if fresh:
        help = "give the script, too" if begun(path) else "leave --fresh out: this run was never begun"
        raise UsageError(f"--fresh is for a script: {path} holds one run", rule="option", help=help)
    return RunFolder(path, is_complete(path))


def run_of(job: Job) -> str:
    """Returns the folder in ./jobs, or the URL of the storage, with a run of this very job: the newest that is
    complete, else the newest. Raises UsageError[unknown-job] where that is another job's, with how it differs."""
    from graphft.transpiler.differences import differences, drawn

    top = str(JOBS / job.config.name)
    differs = f"no {top}"
    for place in filter(None, (top, job.config.storage)):
        if found := run_in(place, complete=True):
            path = Path(found) if place == top else copy_of(found)
            saved = read_record(path)
            same = replace(job, config=job.config.replace(storage=saved.config.storage))  # it may have been moved
            if not (changed := differences(path, saved, same, drawn(saved, same))):
                return found
            differs = f"{found} differs in: {', '.join(changed)}"
    raise UsageError(
        f"there is no run of this job: {differs}",
        rule="unknown-job",
        help="run it first: job.run(); or name the folder: graphft.predict(FOLDER, data)",
    )
