"""Calls the callbacks of a run: for each step and epoch once over all of its scripts, whichever of them are killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.callbacks.callbacks import Callbacks, Run
from graphft.runtime.callbacks.cursor import Cursor
from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.coordination.validations import ValidationRow
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.metric_table import FILE, read_rows

if TYPE_CHECKING:
    from graphft.transpiler import Job

LOCK = "callbacks.lock"
"""In the run's folder: of several scripts that run the job, one calls its callbacks."""
NOTE_SECONDS = 0.5
LATE_SECONDS, LOOK_SECONDS = 3.0, 0.05
"""For how long rows of steps that are done are waited for: another machine's are seen here a little later."""
ROWS = 1 << 14
"""Read at a time."""

EpochMetrics = Callable[[int], Mapping[str, float] | None]
"""What `on_epoch` is given of an epoch (from 1); None: it is not known so far."""


class CallbackRunner:
    """`with runner:` callbacks are called in it by this script alone; without callbacks nothing is done. `tell`: a line
    to the person who started the script."""

    def __init__(self, callbacks: Callbacks, job: Job, job_dir: Path, tell: Callable[[str], object]) -> None:
        self.callbacks, self.job, self._folder, self._tell = callbacks, job, job_dir, tell
        self.begun = False
        """True once callbacks were called."""
        self._plan = job.config.plan
        self._depth, self._stack = 0, contextlib.ExitStack()
        self._cursor: Cursor | None = None
        """None while this script does not call them."""
        self._next = 0
        """The next row to read."""
        self._missing = 0
        """Rows that were to be read, and are not in the table."""
        self._refused = self._broken = False
        self._noted_at = 0.0
        self._noted: Cursor | None = None

    def __enter__(self) -> CallbackRunner:
        self._depth += 1
        if self.callbacks and self._depth == 1:
            try:
                self._take()
            except BaseException:
                self._depth = 0
                self._stack.close()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        self._broken = self._broken or error is not None  # a step was read, and its callbacks perhaps not called
        if self._depth:
            return
        try:
            with contextlib.suppress(*[Exception] * (error is not None)):  # the error is what is to be told
                self._note()
        finally:
            self._stack.close()
            self._cursor = None

    def _take(self) -> None:
        """Begins, unless another script does."""
        try:
            self._stack.enter_context(locked(self._folder, file=LOCK))
        except UsageError as error:
            if not self._refused:
                self._tell(f"{error.message}, and ITS callbacks are called; those of this script are when it has ended")
            self._refused = True
            return
        cursor = Cursor.read(self._folder, self.job.run_id, self._plan.total_steps, self._plan.passes)
        position = (cursor.step, cursor.epoch, cursor.validation)
        if not self.begun:
            self.callbacks.begin(Run.of(self.job, self._folder), position)
            self.begun = True
        if cursor != self._noted or self._broken:
            self._broken = False
            self.callbacks.go_on(position if self._noted else (0, 0, 0))
            self._next = self.callbacks.at_step or 0
        self._cursor = self._noted = cursor
        self._noted_at = time.monotonic()

    # -- what they are called for -----------------------------------------------------------------------------------

    def look(self, status: JobStatus, over: int = 0, metrics: EpochMetrics | None = None) -> None:
        """Passes on a status, once, its events, and the steps and epochs that are there. See `steps`."""
        if not self.callbacks.is_new(status):
            return
        if self._cursor is None:
            self._take()
        if self._cursor is not None:
            self.callbacks.look(status)
            self.steps(over, metrics)

    def hear(self, events: Sequence[Event]) -> None:
        if self._cursor is not None:
            self.callbacks.hear(events)

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
        """Passes on the steps before this one, which are done. A line tells of those whose rows are not there."""
        if self._cursor is None or not self.callbacks.hears("on_step"):
            return
        until = time.monotonic() + LATE_SECONDS * (not self._missing)
        self._read(end)
        while self._next < end and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            self._read(end)
        if self._next < end:
            self._missing += end - self._next
            self._passed(end)
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
        at = self.callbacks.at_epoch if self._cursor is not None else None
        return range(at + 1, done + 1) if at is not None else range(0)

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Unless it was told already."""
        if self._cursor is not None and epoch in self.missed(epoch):
            self.callbacks.epoch(epoch, metrics)
            self._cursor = replace(self._cursor, epoch=max(epoch, self._cursor.epoch))
            self._note()

    def validation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        if self._cursor is not None:
            self.callbacks.tell("on_validation", epoch, metrics)
            self.callbacks.tell("flush")

    def validations(self, found: Iterable[ValidationRow]) -> None:
        """Passes on those of the job itself, in order, each once."""
        if self._cursor is None or not self.callbacks.hears("on_validation") or self.job.config.validate is None:
            return
        for row in found:
            number = row.step if self.job.config.validate.every else row.epoch
            self.callbacks.validation(number, row.metrics)
            self._cursor = replace(self._cursor, validation=max(number, self._cursor.validation))
        self._note()

    def end(self) -> None:
        if self.begun:
            self.callbacks.tell("on_end")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _read(self, end: int) -> None:
        """Passes on the rows before this one that are there."""
        if self._cursor is None or not self.callbacks.hears("on_step"):
            return
        while self._next < end:
            rows = read_rows(self._folder, self._next, min(ROWS, end - self._next))
            for step, values in rows.steps():
                self.callbacks.step(step, values)
                self._passed(step + 1)
                self._note(NOTE_SECONDS)
            if not len(rows):
                return
            self._missing += int((rows.at == 0).sum())
            self._passed(rows.first + len(rows))
        self._note(NOTE_SECONDS)

    def _passed(self, end: int) -> None:
        """Steps before this one are told, or never will be."""
        self._next = max(self._next, end)
        if self._cursor is not None:
            self._cursor = replace(self._cursor, step=max(end, self._cursor.step))

    def _note(self, after: float = 0.0) -> None:
        """Writes the cursor; `after` so many seconds since the last time."""
        if self._cursor is None or self._cursor == self._noted or time.monotonic() < self._noted_at + after:
            return
        self.callbacks.tell("flush")
        try:
            self._cursor.write(self._folder)
        except OSError as error:
            self._tell(f"what callbacks were called for cannot be noted: {error}; the next script calls them again")
        self._noted, self._noted_at = self._cursor, time.monotonic()
