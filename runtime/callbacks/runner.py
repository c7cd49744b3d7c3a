"""Calls the callbacks of a run: for each step and epoch once over all of its scripts.

Up to where they were called is in `callbacks.json` in the run's folder. It is written after the calls: a script that is
killed in between, or whose callback raises an error, repeats the last of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from graphft.disk.fileio import write_atomically
from graphft.disk.sealed_json import seal, unseal
from graphft.errors import UsageError
from graphft.runtime.callbacks.callbacks import Callbacks, Run
from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.result_files import ValidationRow
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.metric_table import FILE, read_rows

if TYPE_CHECKING:
    from graphft.transpiler.job import Job

CURSOR = "callbacks.json"
LOCK = "callbacks.lock"
"""In the run's folder: of several scripts that run the job, one calls its callbacks."""
NOTE_SECONDS = 0.5
LATE_SECONDS, LOOK_SECONDS = 3.0, 0.05
"""For how long rows of steps that are done are waited for: another machine's are seen here a little later."""
ROWS = 1 << 14
"""Read at a time."""

EpochMetrics = Callable[[int], Mapping[str, float] | None]
"""Returns what `on_epoch` gets of an epoch (from 1); None: it is not known so far."""


@dataclass(frozen=True)
class Cursor:
    """Callbacks were called for the steps before `step`, for so many epochs, and the validations up to this one."""

    run: str
    step: int = 0
    epoch: int = 0
    validation: int = 0

    @staticmethod
    def read(job_dir: Path, run: str) -> Cursor:
        """Returns the beginning if nothing was noted of this run. Raises OSError, and UsageError for a damaged file."""
        path = job_dir / CURSOR
        try:
            noted = Cursor(**unseal(path.read_bytes()))
        except FileNotFoundError:
            return Cursor(run)
        except (ValueError, TypeError, IsADirectoryError) as error:
            raise UsageError(
                f"{path} does not say up to where callbacks were called ({error!r})",
                rule="callbacks",
                help="delete it: then they are called for all of the run's steps and epochs again",
            ) from None
        return noted if noted.run == run else Cursor(run)

    def write(self, job_dir: Path) -> None:
        """Raises OSError."""
        write_atomically(job_dir / CURSOR, seal(asdict(self)))


class CallbackRunner:
    """`with runner:` callbacks are called in it by this script alone; without callbacks nothing is done. `tell`: a line
    to the person who started the script."""

    def __init__(self, callbacks: Callbacks, job: Job, job_dir: Path, tell: Callable[[str], object]) -> None:
        self.callbacks, self.job, self._folder, self._tell = callbacks, job, job_dir, tell
        self.begun = False
        """True once callbacks were called."""
        self._plan = job.config.plan
        self._depth, self._stack, self._active = 0, contextlib.ExitStack(), False
        self._cursor = self._noted = Cursor(job.run_id)
        self._noted_at = 0.0
        self._missing = 0
        """Rows that were to be read, and are not in the table."""
        self._refused = False
        self._status: JobStatus | None = None
        self._events: set[tuple[float, str, str]] = set()
        self._since = time.time()
        """etcd keeps the events of earlier scripts."""

    def __enter__(self) -> CallbackRunner:
        if self.callbacks and not self._depth:
            try:
                self._take()
            except BaseException:
                self._stack.close()
                raise
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            with contextlib.suppress(*[Exception] * (error is not None)):  # the error is what counts
                self._note()
        finally:
            self._stack.close()
            self._active = False

    def _take(self) -> None:
        """Begins, unless another script does."""
        try:
            self._stack.enter_context(locked(self._folder, file=LOCK))
        except UsageError as error:
            if not self._refused:
                self._tell(f"{error.message}, and ITS callbacks are called; those of this script are when it has ended")
            self._refused = True
            return
        noted = Cursor.read(self._folder, self.job.run_id)
        if not self.begun:
            self.callbacks.tell("on_begin", Run.of(self.job, self._folder))
            self.begun = True
        own = self._cursor  # it is behind if another script has gone on, and ahead if it could not be noted
        ahead = [max(getattr(noted, name), getattr(own, name)) for name in ("step", "epoch", "validation")]
        self._cursor, self._noted, self._noted_at = Cursor(own.run, *ahead), noted, time.monotonic()
        self._active = True

    def look(self, status: JobStatus, over: int = 0, metrics: EpochMetrics | None = None) -> None:
        """Passes on a status, once, its events, and the steps and epochs that are there. See `steps`."""
        if not self.callbacks or status is self._status:
            return
        if not self._active:
            self._take()
        if self._active:
            self._status = status
            self.callbacks.tell("on_status", status)
            self.hear(status.events)
            self.steps(over, metrics)

    def hear(self, events: Sequence[Event]) -> None:
        """Passes on the events of this script's time, each once."""
        for event in events if self._active else ():
            known = (event.at, event.who, event.text)
            if event.at >= self._since and known not in self._events:
                self._events.add(known)
                self.callbacks.tell("on_event", event)

    def steps(self, over: int = 0, metrics: EpochMetrics | None = None) -> None:
        """Passes on the steps whose rows are there. Of so many epochs that are `over`, those too, each behind its
        steps, as soon as `metrics` knows them."""
        for epoch in self.missed(over) if metrics is not None else ():
            if self.job.config.sync:
                self._read(self._plan.start_steps[epoch])
            found = metrics(epoch) if metrics is not None else None
            if found is None:
                return
            self.epoch(epoch, found)
        self._read(self._plan.total_steps)

    def steps_until(self, end: int) -> None:
        """Passes on the steps before this one, which are done. A line names those whose rows are not there."""
        if not self._active or not self.callbacks.hears("on_step"):
            return
        until = time.monotonic() + LATE_SECONDS * (not self._missing)
        self._read(end)
        while self._cursor.step < end and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            self._read(end)
        if self._cursor.step < end:
            self._missing += end - self._cursor.step
            self._cursor = replace(self._cursor, step=end)
            self._tell(
                f"on_step: {self._missing} steps before step {end} could NOT be told: their rows are not in "
                f"{self._folder / FILE} (the first pserver is on another machine, or its disk was lost or full)"
            )

    def catch_up(self, done: int, metrics: Callable[[int], Mapping[str, float]]) -> None:
        """Passes on the epochs that were missed, each behind its steps."""
        for epoch in self.missed(done):
            self.steps_until(self._plan.start_steps[epoch])
            self.epoch(epoch, metrics(epoch))

    def missed(self, done: int) -> range:
        """Returns those of so many epochs that are done for which callbacks were not called."""
        called = self._active and self.callbacks.hears("on_epoch")
        return range(self._cursor.epoch + 1, done + 1) if called else range(0)

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Calls them for it, unless they were."""
        if epoch in self.missed(epoch):
            self.callbacks.tell("on_epoch", epoch, metrics)
            self._cursor = replace(self._cursor, epoch=epoch)
            self._note()

    def validation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        if self._active:
            self.callbacks.tell("on_validation", epoch, metrics)
            self.callbacks.tell("flush")

    def validations(self, found: Iterable[ValidationRow]) -> None:
        """Passes on those of the job itself, in order, each once."""
        if not self._active or self.job.config.validate is None:
            return
        for row in found:
            number = row.step if self.job.config.validate.every else row.epoch
            if number > self._cursor.validation:
                self.callbacks.tell("on_validation", number, row.metrics)
                self._cursor = replace(self._cursor, validation=number)
        self._note()

    def end(self) -> None:
        if self.begun:
            self.callbacks.tell("on_end")

    def _read(self, end: int) -> None:
        """Passes on the rows before this one that are there."""
        if not self._active or not self.callbacks.hears("on_step"):
            return
        while self._cursor.step < end:
            rows = read_rows(self._folder, self._cursor.step, min(ROWS, end - self._cursor.step))
            for step, values in rows.steps():
                self.callbacks.tell("on_step", step, values)
                self._cursor = replace(self._cursor, step=step + 1)
                self._note(NOTE_SECONDS)
            if not len(rows):
                break
            self._missing += int((rows.at == 0).sum())
            self._cursor = replace(self._cursor, step=rows.first + len(rows))
        self._note(NOTE_SECONDS)

    def _note(self, after: float = 0.0) -> None:
        """Writes the cursor; `after` so many seconds since the last time."""
        if not self._active or self._cursor == self._noted or time.monotonic() < self._noted_at + after:
            return
        self.callbacks.tell("flush")
        try:
            self._cursor.write(self._folder)
        except OSError as error:
            self._tell(f"what callbacks were called for cannot be noted: {error}; the next script calls them again")
        self._noted, self._noted_at = self._cursor, time.monotonic()
