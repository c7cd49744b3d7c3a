"""Looks at jobs' folders: what they tell of a run, whether its etcd answers or not."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from graphft.errors import GraphftError, UsageError, describe, plain_text
from graphft.runtime.callbacks.runner import CURSOR
from graphft.runtime.checkpoint.manifest import lost_so_far
from graphft.runtime.checkpoint.store import checkpoints_of, saved_step
from graphft.runtime.checkpoint.versioned_store import StorageUnavailable
from graphft.runtime.coordination.connect import EtcdNote, connect, read_note
from graphft.runtime.coordination.job_files import JOBS, MODEL, is_complete, is_url, url_of
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.result_files import read_validations
from graphft.runtime.coordination.runs import run_at, run_folders, run_numbers
from graphft.runtime.coordination.status import UNKNOWN_JOB, JobStatus, read_status
from graphft.runtime.launcher.process_ends import ProcessEnds, lost_checkpoints, read_ends
from graphft.runtime.launcher.result import Result, steps_of
from graphft.runtime.launcher.run_folder import begun
from graphft.runtime.process.folder_lock import holder_of
from graphft.runtime.process.metric_table import rows_or_why
from graphft.runtime.process.threads import side_by_side
from graphft.transpiler.config import JobConfig
from graphft.transpiler.criteria import Criterion
from graphft.transpiler.record import RECORD, JobRecord, read_record

ANSWER_SECONDS = 1.0
"""For how long a job's etcd may take to answer."""
State = Literal["complete", "running", "starting", "stopped", "failed", "not begun", "unknown", "unreadable"]
"""unknown: its etcd was not started with it, and does not answer here."""


@dataclass(frozen=True)
class FolderStatus:
    """One look at a job's folder. `at`: when it was completed, last worked on, or made (seconds since 1970). `holder`:
    the launcher that holds it. `lost`: what the job did without. `url`, if that was given, is told instead of the
    folder. `etcd`: of a job that runs, or the user's; with `join` it knows the run. `live`: what it tells of a job that
    runs. `passes`: None where nobody has said how many."""

    folder: Path
    name: str
    state: State
    step: int | None
    steps: int
    at: float
    holder: str = ""
    lost: tuple[str, ...] = ()
    failure: str = ""
    url: str = ""
    etcd: str = ""
    passes: int | None = None
    live: JobStatus | None = None
    on_demand: bool = False
    join: bool = False

    def describe(self) -> str:
        named = self.url or self.folder
        launch = f"graphft launch --job {named}" + f" --etcd {self.etcd}" * self.join
        asks = self.on_demand or (self.folder / CURSOR).exists()  # for its epochs, or to have its callbacks told
        launch = "its script, run again," if asks else launch
        where = f"at step {self._reached}"
        early = f" of {self.steps}" if self.step != self.steps and not self.on_demand else ""
        what = {
            "complete": f"is complete: {self.step}{early} steps, model {self.model}",
            "running": f"is running, {where}{self._waits}",
            "starting": f"is starting ({self.holder}), {where}",
            "stopped": f"is not running; it stopped {where}: {launch} goes on with it",
            "failed": f"failed {where}: {self.why}; {launch} tries it once more",
            "not begun": f"was saved and never begun: graphft launch --job {named}",
            "unknown": f"may run, which is not known: its etcd {self.etcd} does not answer here; give --etcd; its "
            f"newest checkpoint here is {where}",
            "unreadable": f"cannot be read: {self.why}",
        }[self.state]
        return "; ".join([f"the job in {named} {what}", *self.lost])

    @property
    def loss(self) -> float | None:
        return self.live.loss if self.live is not None else None

    @property
    def model(self) -> str:
        """Returns where a complete job's is: here, or in its storage."""
        here = self.folder / MODEL
        return str(here) if here.exists() or not (url := url_of(self.folder)) else f"{url}/{MODEL}"

    @property
    def why(self) -> str:
        return self.failure.split("\nhelp: ", 1)[0].replace("\n", " ")

    @property
    def _reached(self) -> str:
        return ("?" if self.step is None else str(self.step)) + f" of {self.steps}" * (not self.on_demand)

    @property
    def _waits(self) -> str:
        return f", waiting for {self.live.waiting}" if self.live is not None and self.live.waiting else ""

    def row(self) -> tuple[str, str, str]:
        reached = "" if self.state == "unreadable" else self._reached
        return self.url or plain_text(str(self.folder)), self.state + self._waits, reached

    def remarks(self) -> list[str]:
        why = f"{'cannot be read' if self.state == 'unreadable' else 'failed'}: {self.why}"
        return [plain_text(text) for text in (*self.lost, *([why] if self.failure else []))]

    def to_json(self) -> dict[str, object]:
        row = next(reversed(read_validations(self.folder).values()), None)
        validated = {"step": row.step, "epoch": row.epoch, "means": dict(row.metrics)} if row is not None else None
        return {
            "job": self.name,
            "folder": self.url or plain_text(str(self.folder)),
            "state": self.state,
            "step": self.step,
            "total_steps": None if self.on_demand else self.steps,
            "epoch": self.live.pass_index if self.live is not None else None,
            "epochs": self.passes,
            "loss": self.loss,
            "at": self.at,
            "launcher": self.holder,
            "waiting": self.live.waiting if self.live is not None else "",
            "model": self.model if self.state == "complete" else None,
            "lost": list(self.lost),
            "validated": validated,
            "failure": self.failure,
            "etcd": self.etcd,
        }


def list_folders(root: Path = JOBS) -> list[FolderStatus]:
    """Returns the jobs in a folder, the one that was worked on last at the end."""
    looks = side_by_side(look_if_there, run_folders(root))  # at one that was killed, its etcd is waited for
    return sorted(looks, key=lambda s: s.at)


def look_if_there(folder: Path) -> FolderStatus:
    """As `look_at`; one job whose storage is away does not hide the others."""
    try:
        return look_at(folder)
    except GraphftError:
        record = read_record(folder)
        return FolderStatus(folder, record.config.name, "unknown", None, record.config.total_steps, _last_work(folder))


def look_at(folder: Path) -> FolderStatus:
    """Returns one look, without waiting for anything. Raises GraphftError[storage] where a storage cannot be asked."""
    try:
        record = read_record(folder)
    except GraphftError as error:
        name, at = plain_text(folder.name), _modified(folder)
        return FolderStatus(folder, name, "unreadable", None, 0, at, failure=error.message)
    config, holder, note = record.config, holder_of(folder), note_of(folder, record.config)
    passes = None if config.passes_on_demand else config.epochs

    def found(state: State, step: int | None, at: float, **more: Any) -> FolderStatus:
        more = {"passes": passes, "on_demand": config.passes_on_demand, **more}
        return FolderStatus(folder, config.name, state, step, config.total_steps, at, **more)

    if is_complete(folder):
        at = _modified(folder / MODEL) or _last_work(folder)  # it may be in its storage alone
        return found("complete", steps_of(folder, config), at, lost=_lost(folder, record))
    answers, live = ask(note, record, brief=True)
    if live is not None and not live.idle:
        more: dict[str, Any] = {"holder": holder, "etcd": note.endpoints, "live": live, "passes": live.passes or None}
        return found("running", live.step, time.time(), **more)
    saved = saved_step(folder, config)
    if holder:
        return found("starting", saved, time.time(), holder=holder)
    if not begun(folder):
        return found("not begun", 0, _modified(folder / RECORD))
    known, failure = answers or not note.endpoints or note.own, read_ends(folder).failed
    gone = lost_checkpoints(folder, saved)
    lost = (f"its checkpoints {gone}: bring them back, or mount what holds them",) * bool(gone)
    lost += _lost_so_far(folder, record)
    state: State = "failed" if failure else "stopped" if known else "unknown"
    more = {"etcd": "" if note.own else note.endpoints, "join": live is not None and not note.own}
    return found(state, saved, _last_work(folder), failure=failure, lost=lost, **more)


def _lost(folder: Path, record: JobRecord) -> tuple[str, ...]:
    try:
        result = Result.of(folder, record.config.total_steps, 0.0)
        return tuple(result.lost(record.config.data.records, losses=False))
    except (GraphftError, OSError, ValueError) as error:
        return (f"what it lost cannot be read: {describe(error)}",)


def _lost_so_far(folder: Path, record: JobRecord) -> tuple[str, ...]:
    with contextlib.suppress(StorageUnavailable):
        own = [m for m in checkpoints_of(folder).manifests() if m.run == record.run_id]
        newest = max(own, key=lambda m: (m.generation, m.step), default=None)
        return tuple(lost_so_far(record.config, newest)) if newest is not None else ()
    return ()


def note_of(folder: Path, config: JobConfig) -> EtcdNote:
    note = read_note(folder)
    return note if note.endpoints else EtcdNote(",".join(config.etcd_endpoints or ()))


def ask(note: EtcdNote, record: JobRecord, *, brief: bool) -> tuple[bool, JobStatus | None]:
    """Returns True if the run's etcd answers; and what it tells, if it knows this very run."""
    if not note.endpoints:
        return False, None
    try:
        with connect(note.endpoints, ANSWER_SECONDS) as etcd:
            status = read_status(etcd, Keys(record.config.name), deadline=ANSWER_SECONDS, brief=brief)
    except GraphftError as error:
        return error.rule == UNKNOWN_JOB, None
    return True, status if status.spec.get("run") == record.run_id else None


def _last_work(folder: Path) -> float:
    return max(map(_modified, [folder / RECORD, *folder.glob("logs/*"), *folder.glob("checkpoints/*")]))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# -- with what their files tell --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListedRun:
    """A run that was found. `best`: its best value by `criterion`, and the epoch (from 1)."""

    status: FolderStatus
    bytes: int
    ends: ProcessEnds
    last_loss: float | None = None
    criterion: Criterion = field(default_factory=Criterion)
    best: tuple[float, int] | None = None
    unread: str = ""

    @property
    def loss(self) -> float | None:
        return self.last_loss if self.status.loss is None else self.status.loss

    def remarks(self) -> list[str]:
        """Returns what is told below a table."""
        return [*self.status.remarks(), *filter(None, (plain_text(self.unread),))]

    def to_json(self) -> dict[str, object]:
        """Returns what `graphft status --json` has of a job that does not run, and more."""
        found = None if self.best is None else {"value": self.best[0], "epoch": self.best[1]}
        by = {"metric": self.criterion.metric, "mode": self.criterion.mode}
        return self.status.to_json() | {
            "last_loss": self.loss,
            "best": by | found if found is not None else None,
            "unread": plain_text(self.unread),
            "bytes": self.bytes,
            "launches": self.ends.launches,
            "preemptions": sum(self.ends.preemptions.values()),
            "failures": sum(self.ends.failures.values()),
        }


def list_runs(place: str) -> list[ListedRun]:
    """Returns the runs in a folder, the one that was worked on last at the end; or that in it, if it is a run's. Raises
    UsageError if there are none, and for a URL."""
    if is_url(place):
        raise UsageError(
            f"{place} is a URL, and the runs of a folder are listed",
            rule="option",
            help="graphft status --job URL tells of the job in a storage",
        )
    folder = Path(place)
    own = [Path(run_at(place, number)) for number in run_numbers(folder)]
    if (folder / RECORD).exists() or own:
        found = list(map(look_if_there, own or [folder]))
    else:
        found = list_folders(folder)
    if not found:
        raise UsageError(
            f"there are no jobs in {folder.absolute()}",
            rule="unknown-job",
            help="graphft runs FOLDER looks elsewhere; graphft status --etcd HOST:PORT has what an etcd knows",
        )
    return [read_run(status) for status in found]


def read_run(status: FolderStatus) -> ListedRun:
    folder = status.folder
    size, ends = disk_bytes(folder), read_ends(folder)
    try:
        config = read_record(folder).config
    except GraphftError:
        return ListedRun(status, size, ends)
    rows, why = rows_or_why(folder)
    _, known = rows.known()
    last = float(known.values("loss")[-1]) if len(known) else None
    criterion = (config.validate.best if config.validate is not None else None) or Criterion()
    return ListedRun(status, size, ends, last, criterion, _best(folder, config, criterion), why)


def _best(folder: Path, config: JobConfig, criterion: Criterion) -> tuple[float, int] | None:
    sign, starts = 1 if criterion.mode == "min" else -1, config.plan.start_steps
    values = [
        (sign * row.metrics[criterion.metric], row.epoch + (row.step not in starts))  # within an epoch: of that one
        for row in read_validations(folder).values()
        if not math.isnan(row.metrics.get(criterion.metric, math.nan))
    ]
    return (sign * min(values)[0], min(values)[1]) if values else None


def disk_bytes(path: Path) -> int:
    """Returns what a file takes on the disk, or all files below a folder: etcd's are mostly holes. What cannot be
    looked at, or is deleted meanwhile, counts as nothing."""
    return sum(_blocks(Path(folder, name)) for folder, _, names in os.walk(path) for name in names) or _blocks(path)


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
