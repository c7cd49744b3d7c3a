"""The callbacks of `job.run`: told in the launcher's own loop, of a job whose passes follow one another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from graphft.errors import GraphftError
from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.callbacks.epoch_sums import EpochSums
from graphft.runtime.callbacks.step_rows import PATIENCE_SECONDS
from graphft.runtime.callbacks.teller import Teller
from graphft.runtime.coordination.job_storage import is_complete
from graphft.runtime.coordination.records import Validated
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.ending import WORDS_SECONDS, Reached
from graphft.runtime.launcher.process_ends import past_epoch
from graphft.runtime.launcher.tell import tell
from graphft.runtime.process.bounded import within
from graphft.runtime.process.validations import read_validations

if TYPE_CHECKING:
    from graphft.runtime.launcher.supervisor import Supervisor
    from graphft.transpiler import Job

OnStatus = Callable[["Supervisor", JobStatus], None]


class CallbackObserver:
    """`with CallbackObserver(...) as observer:` holds a launch that gets `observer.look`; then `observer.finish`."""

    def __init__(self, callbacks: Callbacks, job: Job, job_dir: Path, on_status: OnStatus | None) -> None:
        self.job, self._job_dir, self._on_status = job, job_dir, on_status
        self.teller = Teller(callbacks, job, job_dir, tell)
        self._stack, self._begun, self._finished = ExitStack(), False, False
        self._validated: Validated | None = None
        self._over = [(0.0, 0)]
        """When it was seen that passes up to which step are over: the last look that is `PATIENCE_SECONDS` old, and
        those after it."""

    def __enter__(self) -> CallbackObserver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)
        if kind is not None and not self._finished:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C again
                self._tell_where(kind)

    def _tell_where(self, kind: type[BaseException]) -> None:
        """The job is, where no other line says so; and that callbacks lack what nobody will tell them later."""
        if not issubclass(kind, GraphftError | KeyboardInterrupt):
            tell(Reached(self._job_dir, self.job.config, how=f"{kind.__name__} has ended the launch").describe())
        if within(WORDS_SECONDS, lambda: is_complete(self._job_dir), False):
            tell("callbacks were NOT told of all of it: an epoch, a validation, or on_end")

    def look(self, supervisor: Supervisor, status: JobStatus) -> None:
        if self._on_status is not None:
            self._on_status(supervisor, status)
        self._begin()
        self.teller.look(status, self._ended, self._over_by_now(status))
        if status.validated != self._validated:
            self._validated = status.validated
            self.teller.validations(read_validations(self._job_dir).values())

    def finish(self, step: int) -> None:
        """All steps before this one are done, and no process writes any more."""
        self._begin()
        self.teller.steps(step, self._ended)
        self.teller.tell_lacking()
        self.teller.validations(read_validations(self._job_dir).values())
        self.teller.end()
        self._finished = True

    def _begin(self) -> None:
        """At the first look: the folder is this launcher's then."""
        if not self._begun:
            self._begun = True
            self._stack.enter_context(self.teller)

    def _over_by_now(self, status: JobStatus) -> int:
        """Steps before this one get no more rows: trainers that were slow to write have written them."""
        now, starts = time.monotonic(), self.job.config.plan.start_steps
        step = starts[min(status.pass_index, self.job.config.plan.passes)]
        if step > self._over[-1][1]:
            self._over.append((now, step))
        while len(self._over) > 1 and self._over[1][0] + PATIENCE_SECONDS <= now:
            del self._over[0]
        return self._over[0][1]

    def _ended(self, sums: EpochSums) -> dict[str, float]:
        return past_epoch(self.job.config, self._job_dir, sums)
