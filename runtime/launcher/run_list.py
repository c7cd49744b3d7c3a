"""The runs in a folder, with what their folders tell: loss, best metric, size, how often processes ended."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphft.errors import GraphftError, UsageError, plain_text
from graphft.runtime.coordination.job_storage import is_url
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
    """A run that was found. `config`: None if it cannot be read. `validated`: of each metric (epoch from 1, value)."""

    status: FolderStatus
    config: JobConfig | None
    bytes: int
    ends: ProcessEnds
    last_loss: float | None = None
    validated: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    unread: str = ""
    """Why its metrics cannot be read."""

    @property
    def loss(self) -> float | None:
        """Of a job that runs, what its trainers told last; else of the last step that is recorded."""
        return self.last_loss if self.status.loss is None else self.status.loss

    def criterion(self, wanted: Criterion | None) -> Criterion:
        """Returns by what its best value is told: `wanted`, or as the job keeps its best model, or the loss."""
        validate = self.config.validate if self.config is not None else None
        return wanted or (validate.best if validate is not None else None) or Criterion()

    def best(self, wanted: Criterion | None) -> tuple[float, int] | None:
        """Returns the best value of its validations, and the epoch; None where there is no value of that metric."""
        criterion = self.criterion(wanted)
        sign = 1 if criterion.mode == "min" else -1
        values = self.validated.get(criterion.metric, ())
        value, epoch = min(((sign * v, epoch) for epoch, v in values if not math.isnan(v)), default=(0.0, 0))
        return (sign * value, epoch) if epoch else None

    def goodness(self, wanted: Criterion | None) -> float:
        """Returns what is larger of a better run."""
        best = self.best(wanted)
        sign = 1 if self.criterion(wanted).mode == "max" else -1
        return -math.inf if best is None else sign * best[0]

    def remarks(self) -> list[str]:
        """Returns what is told below a table."""
        return [*self.status.remarks(), *filter(None, (plain_text(self.unread),))]

    def to_json(self, wanted: Criterion | None) -> dict[str, object]:
        """Returns what `graphft status --json` has of a job that does not run, and more."""
        best, criterion = self.best(wanted), self.criterion(wanted)
        found = None if best is None else {"value": best[0], "pass": best[1]}
        return self.status.to_json() | {
            "last_loss": self.loss,
            "best": {"metric": criterion.metric, "mode": criterion.mode} | found if found is not None else None,
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
        return ListedRun(status, None, size, ends)
    (rows, why), plan, validated = rows_or_why(folder), config.plan, dict[str, list[tuple[int, float]]]()
    for row in read_validations(folder).values():
        epoch = row.epoch + (row.step not in plan.start_steps)  # within an epoch: of that one
        for name, value in row.metrics.items():
            validated.setdefault(name, []).append((epoch, value))
    _, known = rows.known()
    last = float(known.values("loss")[-1]) if len(known) else None
    return ListedRun(status, config, size, ends, last, validated, why)


def disk_bytes(path: Path) -> int:
    """Returns what a file takes on the disk, or all files below a folder: etcd's are mostly holes. What cannot be
    looked at, or is deleted meanwhile, counts as nothing."""
    return sum(_blocks(Path(folder, name)) for folder, _, names in os.walk(path) for name in names) or _blocks(path)


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
