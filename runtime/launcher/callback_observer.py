"""The callbacks of `job.run`: called in the launcher's own loop, of a job whose epochs follow one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from graphft.errors import GraphftError
from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.callbacks.runner import CallbackRunner
from graphft.runtime.coordination.epoch_metrics import epoch_of_table, recorded_epoch
from graphft.runtime.coordination.job_storage import is_complete
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.coordination.validations import read_validations
from graphft.runtime.etcd.model import Store
from graphft.runtime.launcher.ending import WORDS_SECONDS, Reached
from graphft.runtime.launcher.process_ends import past_epoch
from graphft.runtime.launcher.tell import tell
from graphft.runtime.process.threads import within

if TYPE_CHECKING:
    from graphft.runtime.launcher.supervisor import Supervisor
    from graphft.transpiler import Job

OnStatus = Callable[["Supervisor", JobStatus], None]


class CallbackObserver:
    """`with CallbackObserver(...) as observer:` holds a launch that gets `observer.look`; then `observer.finish`."""

    def __init__(self, callbacks: Callbacks, job: Job, job_dir: Path, on_status: OnStatus | None) -> None:
        self.job, self._job_dir, self._on_status = job, job_dir, on_status
        self.runner = CallbackRunner(callbacks, job, job_dir, tell)
        self._stack, self._begun, self._finished = ExitStack(), False, False
        self._validated: Validated | None = None

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
        over = self._over(status.step) if status.state == "complete" else status.pass_index
        self.runner.look(status, over, lambda epoch: self._metrics(epoch, supervisor.etcd))
        if status.validated != self._validated:
            self._validated = status.validated
            self.runner.validations(read_validations(self._job_dir).values())

    def finish(self, step: int) -> None:
        """All steps before this one are done, and no process writes any more."""
        self._begin()
        self.runner.steps(self._over(step), self._metrics)
        self.runner.steps_until(step)
        self.runner.validations(read_validations(self._job_dir).values())
        self.runner.end()
        self._finished = True

    def _begin(self) -> None:
        """At the first look: the folder is this launcher's then."""
        if not self._begun:
            self._begun = True
            self._stack.enter_context(self.runner)

    def _over(self, steps: int) -> int:
        """Returns how many epochs a complete job of so many steps has."""
        return self.job.config.plan.pass_of(steps) if self.job.config.sync else self.job.config.passes

    def _metrics(self, epoch: int, etcd: Store | None = None) -> dict[str, float] | None:
        """Returns those that the table here has, if it has all, or that etcd has; without etcd what there is."""
        found = epoch_of_table(self._job_dir, self.job.config, epoch - 1)
        if found.lacking and etcd is not None:
            recorded = recorded_epoch(etcd, Keys(self.job.config.name), epoch - 1)
            if recorded is None:
                return None
            found = recorded
        return past_epoch(self.job.config, self._job_dir, epoch, found)
