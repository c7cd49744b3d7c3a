"""The runs in a folder, with what their folders tell: loss, best metric, size, how often processes ended."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from graphft.errors import GraphftError, UsageError, plain_text
from graphft.runtime.coordination.job_files import is_url
from graphft.runtime.coordination.result_files import read_validations
from graphft.runtime.coordination.runs import run_at, run_numbers
from graphft.runtime.launcher.folder_status import FolderStatus, list_folders, look_if_there
from graphft.runtime.launcher.process_ends import ProcessEnds, read_ends
from graphft.runtime.process.metric_table import rows_or_why
from graphft.transpiler.config import JobConfig
from graphft.transpiler.criteria import Criterion
from graphft.transpiler.record import RECORD, read_record


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
        found = None if self.best is None else {"value": self.best[0], "pass": self.best[1]}
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
