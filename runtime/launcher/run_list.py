"""The jobs in a folder, or below a URL, with what their folders tell."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from graphft.errors import GraphftError, UsageError, plain_text
from graphft.runtime.coordination.job_storage import is_url
from graphft.runtime.coordination.runs import copy_of, run_at, run_numbers
from graphft.runtime.fs import FS, file_system
from graphft.runtime.launcher.folder_sizes import sizes_in
from graphft.runtime.launcher.folder_status import FolderStatus, list_folders, look_if_there
from graphft.runtime.launcher.run_figures import Best, Figures, figures_of
from graphft.transpiler.config import JobConfig
from graphft.transpiler.criteria import Criterion
from graphft.transpiler.record import RECORD, read_record


@dataclass(frozen=True)
class Run:
    """A job that was found. `config`: None if it cannot be read."""

    status: FolderStatus
    figures: Figures
    config: JobConfig | None

    @property
    def loss(self) -> float | None:
        """Of a job that runs, what its trainers told last; else of the last step that is recorded."""
        return self.figures.last_loss if self.status.loss is None else self.status.loss

    @property
    def at_pass(self) -> int | None:
        """The pass that it is at, from 1; of a complete job, and of a Trainer's at an epoch's end, the last one."""
        status = self.status
        if status.pass_index is not None and self.config is not None:
            return min(status.pass_index + 1, self.config.passes)
        if self.config is None or status.step is None:
            return None
        at_rest = status.on_demand or status.state == "complete"
        plan, ends = self.config.plan, at_rest and self.config.plan.begins_pass(status.step)
        return min(plan.pass_of(status.step) + 1 - ends, plan.passes)

    def criterion(self, wanted: Criterion | None) -> Criterion:
        """By what its best value is told: as `wanted`, or as the job itself keeps its best model, or by the loss."""
        validate = self.config.validate if self.config is not None else None
        return wanted or (validate.best if validate is not None else None) or Criterion()

    def best(self, wanted: Criterion | None) -> Best | None:
        return self.figures.best(self.criterion(wanted))

    def remarks(self) -> list[str]:
        """What is told below a table."""
        return [*self.status.remarks(), *map(plain_text, self.figures.unread)]

    def to_json(self, wanted: Criterion | None) -> dict[str, object]:
        """What `graphft status --json` has of a job that does not run, and the figures."""
        best, ends, criterion = self.best(wanted), self.figures.ends, self.criterion(wanted)
        found = None if best is None else {"value": best.value, "pass": best.epoch, "of": best.of}
        return self.status.to_json() | {
            "at_pass": self.at_pass,
            "last_loss": self.loss,
            "best": {"metric": criterion.metric, "mode": criterion.mode} | found if found is not None else None,
            "unread": [plain_text(text) for text in self.figures.unread],
            "bytes": dict(self.figures.sizes),
            "launches": ends.launches,
            "preemptions": sum(ends.preemptions.values()),
            "failures": sum(ends.failures.values()),
        }


def list_runs(place: str) -> list[Run]:
    """The jobs in a folder, that which was worked on last at the end; or that in it, if it is a job's. `place` may be
    the URL of storages. Raises UsageError[unknown-job] if there are none, GraphftError[storage]."""
    found = _stored(place.rstrip("/")) if is_url(place) else _local(Path(place))
    if not found:
        there = place if is_url(place) else Path(place).absolute()
        raise UsageError(
            f"there are no jobs in {there}",
            rule="unknown-job",
            help="graphft runs FOLDER looks elsewhere, also below a URL; graphft status --etcd HOST:PORT has what an "
            "etcd knows",
        )
    return found


def _local(folder: Path) -> list[Run]:
    if (folder / RECORD).exists():
        return [_run(look_if_there(folder))]
    own = [Path(run_at(str(folder), number)) for number in run_numbers(folder)]
    return [_run(status) for status in (map(look_if_there, own) if own else list_folders(folder))]


def _run(status: FolderStatus) -> Run:
    try:
        config = read_record(status.folder).config
    except GraphftError:
        config = None
    return Run(status, figures_of(status.folder, config.plan if config is not None else None), config)


def _stored(url: str) -> list[Run]:
    fs, root = file_system(url)
    try:
        return sorted(_stored_runs(fs, root, url), key=lambda run: run.status.at)
    except (OSError, NotImplementedError) as error:
        raise GraphftError(
            f"{url} cannot be listed: {error or type(error).__name__}",
            rule="storage",
            help="see whether it can be reached from here; of one job: graphft status --job URL",
        ) from error


def _stored_runs(fs: FS, root: str, url: str) -> Iterator[Run]:
    jobs = [url, *(posixpath.join(url, name) for name in fs.list_dirs(root))]
    for place in jobs:
        for there in (place, *(run_at(place, number) for number in run_numbers(place))):
            path = posixpath.join(root, there.removeprefix(url).strip("/")).rstrip("/")
            if fs.size(posixpath.join(path, RECORD)) is not None:
                yield _stored_run(fs, path, there)


def _stored_run(fs: FS, path: str, url: str) -> Run:
    """What the storage has of it, and the copy of this machine, if there is one: logs and metrics."""
    try:
        found = _run(look_if_there(copy_of(url)))
    except GraphftError as error:
        name = posixpath.basename(url)
        status = FolderStatus(Path(name), name, "unreadable", None, 0, time.time(), failure=error.message)
        found = Run(status, Figures(), None)
    sizes = sizes_in(fs, path)
    return replace(found, status=replace(found.status, url=url), figures=replace(found.figures, sizes=sizes))
