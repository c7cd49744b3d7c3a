"""Observes a launch, each status of its job: for callbacks, and to tell what a job waits for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.callbacks.runner import CallbackRunner
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.coordination.result_files import epoch_of_table, read_validations, recorded_epoch
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd.model import Store
from graphft.runtime.launcher.ending import tell
from graphft.runtime.launcher.process_ends import past_epoch
from graphft.runtime.launcher.supervisor import Supervisor

if TYPE_CHECKING:
    from graphft.transpiler.job import Job


class CallbackObserver:
    """Calls the callbacks of `job.run` in the launcher's own loop, of a job whose epochs follow one another. `stack`
    ends them."""

    def __init__(self, callbacks: Callbacks, job: Job, job_dir: Path, stack: ExitStack) -> None:
        self.job, self._job_dir, self._stack = job, job_dir, stack
        self.runner = CallbackRunner(callbacks, job, job_dir, tell)
        self._begun = False
        self._validated: Validated | None = None

    def look(self, supervisor: Supervisor, status: JobStatus) -> None:
        self._begin()
        over = self._epochs(status.step) if status.state == "complete" else status.pass_index
        self.runner.look(status, over, lambda epoch: self._metrics(epoch, supervisor.etcd))
        if status.validated != self._validated:
            self._validated = status.validated
            self.runner.validations(read_validations(self._job_dir).values())

    def finish(self, step: int) -> None:
        self._begin()
        self.runner.steps(self._epochs(step), self._metrics)
        self.runner.steps_until(step)
        self.runner.validations(read_validations(self._job_dir).values())
        self.runner.end()

    def _begin(self) -> None:
        """At the first look: the folder is this launcher's then."""
        if not self._begun:
            self._begun = True
            self._stack.enter_context(self.runner)

    def _epochs(self, steps: int) -> int:
        return self.job.config.plan.pass_of(steps) if self.job.config.sync else self.job.config.epochs

    def _metrics(self, epoch: int, etcd: Store | None = None) -> dict[str, float] | None:
        """Returns those that the table here has, if it has all, or that etcd has; without etcd what there is."""
        found = epoch_of_table(self._job_dir, self.job.config, epoch - 1)
        if found.lacking and etcd is not None:
            recorded = recorded_epoch(etcd, Keys(self.job.config.name), epoch - 1)
            if recorded is None:
                return None
            found = recorded
        return past_epoch(self.job.config, self._job_dir, epoch, found)
