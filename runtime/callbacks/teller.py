"""Tells the callbacks of a run, of each step and epoch once over all of its scripts, whichever of them are killed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.callbacks.callbacks import Callbacks, Run
from graphft.runtime.callbacks.epoch_sums import EpochSums
from graphft.runtime.callbacks.step_rows import PATIENCE_SECONDS, Step, StepRows
from graphft.runtime.callbacks.told import Told
from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.validations import ValidationRow

if TYPE_CHECKING:
    from graphft.transpiler import Job

LOCK = "callbacks.lock"
"""In the run's folder: of several scripts that run the job, one tells its callbacks."""
NOTE_SECONDS = 0.5
LATE_SECONDS, LOOK_SECONDS = 3.0, 0.05
"""For how long rows of an epoch that is done are waited for: another machine's are seen here a little later."""

Ended = Callable[[EpochSums], Mapping[str, float]]
"""What `on_epoch` is told of an epoch, made of its rows."""


class Teller:
    """`with teller:` what is told in it is told by this script alone; without callbacks nothing is done. `tell`: a line
    to the person who started the script."""

    def __init__(self, callbacks: Callbacks, job: Job, job_dir: Path, tell: Callable[[str], object]) -> None:
        self.callbacks, self.job, self._folder, self._tell = callbacks, job, job_dir, tell
        self.begun = False
        """Whether the callbacks were told anything."""
        self._plan = job.config.plan
        self._depth, self._stack = 0, contextlib.ExitStack()
        self._told: Told | None = None
        """None while this script does not tell."""
        self._rows: StepRows
        self._sums: EpochSums
        self._refused = self._waits_in_vain = self._broken = False
        self._noted_at = 0.0
        self._noted: Told | None = None
        self._lacking: list[Step] = []
        """Those of late that lack rows: the first and the last of them, ..."""
        self._incomplete = self._untold = 0
        """... and how many were told with what there is, or not at all."""

    def __enter__(self) -> Teller:
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
        self._broken = self._broken or error is not None  # a step was read, and perhaps not told
        if self._depth:
            return
        try:
            with contextlib.suppress(*[Exception] * (error is not None)):  # the error is what is to be told
                self._note()
        finally:
            self._stack.close()
            self._told = None

    def _take(self) -> None:
        """Begins to tell, unless another script does."""
        try:
            self._stack.enter_context(locked(self._folder, file=LOCK))
        except UsageError as error:
            if not self._refused:
                self._tell(f"{error.message}, and ITS callbacks are told; those of this script are when it has ended")
            self._refused = True
            return
        told = Told.read(self._folder, self.job.run_id, self._plan.total_steps, self._plan.passes)
        if not self.begun:
            self.callbacks.begin(Run.of(self.job, self._folder), (told.step, told.epoch, told.validation))
            self.begun = True
        if told != self._noted or self._broken:
            self._broken = False
            self.callbacks.go_on((told.step, told.epoch, told.validation) if self._noted else (0, 0, 0))
            self._open_rows()
        self._told = self._noted = told
        self._noted_at = time.monotonic()

    def _open_rows(self) -> None:
        """From the first step that is to be told, or is of an epoch that is."""
        plan, step, epoch = self._plan, self.callbacks.at_step, self.callbacks.at_epoch
        begins = plan.total_steps if step is None else step
        if epoch is not None:
            begins = plan.start_steps[min(plan.pass_of(begins), epoch, plan.passes)]
        patience = PATIENCE_SECONDS if self.job.config.sync else math.inf
        self._rows = StepRows(self._folder, plan, begins, patience)
        self._begin_sums(begins)

    def _begin_sums(self, step: int) -> None:
        from graphft.loss_results import reported  # it needs torch, as a script does that has callbacks

        index, starts = self._plan.pass_of(step), self._plan.start_steps
        names = reported(self.job.trainer_program())
        self._sums = EpochSums(index + 1, starts[min(index + 1, self._plan.passes)] - starts[index], names)

    # -- what is told -----------------------------------------------------------------------------------------------

    def look(self, status: JobStatus, ended: Ended | None = None, over: int = 0) -> None:
        """Tells of a status, once, of its events, and of the steps that are there. See `steps`."""
        if not self.callbacks.is_new(status):
            return
        if self._told is None:
            self._take()
        if self._told is not None:
            self.callbacks.look(status)
            self.steps(over, ended)

    def hear(self, events: Sequence[Event]) -> None:
        if self._told is not None:
            self.callbacks.hear(events)

    def steps(self, over: int = 0, ended: Ended | None = None) -> None:
        """Tells of the steps whose rows are there; of those before `over` that lack some, with what there is. `ended`:
        of the epochs that end with them, too, as it makes their metrics."""
        if self._told is None or not self.callbacks.hears("on_step", *["on_epoch"] * (ended is not None)):
            return
        skips = self.job.config.on_nonfinite == "skip"
        for step in self._rows.steps(over):
            self._tell_step(step)
            self._sums.add(step.rows, step.lacking, skips)
            if self._plan.begins_pass(step.number + 1):
                if ended is not None and self._sums.epoch in self.missed(self._sums.epoch):
                    self.epoch(self._sums.epoch, ended(self._sums))
                self._begin_sums(step.number + 1)
            self._note(NOTE_SECONDS)
        self._note()

    def steps_until(self, end: int) -> None:
        """Tells of the steps before this one, which are done."""
        if self._told is None or not self.callbacks.hears("on_step"):
            return
        until = time.monotonic() + LATE_SECONDS * (not self._waits_in_vain)
        self.steps()
        while self._rows.next < end and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            self.steps()
        self._waits_in_vain = self._rows.next < end
        self.steps(end)
        self.tell_lacking()

    def missed(self, done: int) -> range:
        """Of so many epochs that are done, those that were not told."""
        at = self.callbacks.at_epoch if self._told is not None else None
        return range(at + 1, done + 1) if at is not None else range(0)

    def catch_up(self, done: int, ended: Ended) -> None:
        """Tells of the epochs that were missed, and of all steps before them."""
        if self.missed(done):
            self._open_rows()
            self.steps(self._plan.start_steps[done], ended)
            self.tell_lacking()

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Unless it was told already."""
        if self._told is not None and epoch in self.missed(epoch):
            self.callbacks.epoch(epoch, metrics)
            self._told = replace(self._told, epoch=max(epoch, self._told.epoch))
            self._note()

    def validation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        if self._told is not None:
            self.callbacks.tell("on_validation", epoch, metrics)
            self.callbacks.tell("flush")

    def validations(self, found: Iterable[ValidationRow]) -> None:
        """Tells of those of the job itself, in order, unless they were told."""
        if self._told is None or not self.callbacks.hears("on_validation") or self.job.config.validate is None:
            return
        for row in found:
            number = row.step if self.job.config.validate.every else row.epoch
            self.callbacks.validation(number, row.metrics)
            self._told = replace(self._told, validation=max(number, self._told.validation))
        self._note()

    def end(self) -> None:
        if self.begun:
            self.callbacks.tell("on_end")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _tell_step(self, step: Step) -> None:
        at = self.callbacks.at_step
        if self._told is None or at is None or step.number < at:
            return
        metrics = step.means
        if step.lacking:
            self._lacking = [*self._lacking[:1], step]
            self._incomplete, self._untold = self._incomplete + bool(metrics), self._untold + (not metrics)
        self.callbacks.step(step.number, metrics or None)
        self._told = replace(self._told, step=max(step.number + 1, self._told.step))

    def tell_lacking(self) -> None:
        """A line of the steps that could not be told as they were."""
        if not self._lacking:
            return
        first, last = self._lacking[0].number, self._lacking[-1].number
        told = f"{self._incomplete} were told WITHOUT the rows of some slots" if self._incomplete else ""
        untold = f"{self._untold} could NOT be told" if self._untold else ""
        self._tell(
            f"on_step: between steps {first} and {last}, {' and '.join(filter(None, (told, untold)))}: their rows are "
            f"not in {self._folder / 'metrics'} (their trainers are on other machines or were killed, a disk is full, "
            "or their batches were left out)"
        )
        self._lacking, self._incomplete, self._untold = [], 0, 0

    def _note(self, after: float = 0.0) -> None:
        """That all this was told; `after` so many seconds since the last time."""
        if self._told is None or self._told == self._noted or time.monotonic() < self._noted_at + after:
            return
        self.callbacks.tell("flush")
        try:
            self._told.write(self._folder)
        except OSError as error:
            self._tell(f"what callbacks were told cannot be noted: {error}; the next script tells of it again")
        self._noted, self._noted_at = self._told, time.monotonic()
