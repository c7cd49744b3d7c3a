"""Observes a launch, each status of its job: for callbacks, and to tell what a job waits for."""

from __future__ import annotations

import contextlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.callbacks.runner import CallbackRunner
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.coordination.result_files import epoch_of_table, read_validations, recorded_epoch
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import EtcdError
from graphft.runtime.etcd.model import Store
from graphft.runtime.launcher.ending import tell
from graphft.runtime.launcher.process_ends import past_epoch
from graphft.runtime.launcher.supervisor import Supervisor

if TYPE_CHECKING:
    from graphft.transpiler import Job

WAITS = {"storage-unavailable", "storage-wait", "damaged-checkpoint", "cannot-start"}
"""Kinds of events without which a job that waits looks like one that hangs."""
LOOK_SECONDS, ETCD_SECONDS = 2.0, 1.0


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
        """All steps before this one are done, and no process writes any more."""
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


class WaitsOfQuietLaunch:
    """Tells what the job waits for, each event once, where no panel is shown. `since`: Unix seconds when the launch
    began; earlier events are of another."""

    def __init__(self, etcd: Store, keys: Keys, since: float) -> None:
        self._etcd, self._keys, self._since = etcd, keys, since
        self._told: set[str] = set()
        self._next_look = 0.0

    def look(self, _: object = None, last: bool = False) -> None:
        """Looks now and then; for the `last` time at once."""
        if time.monotonic() < self._next_look and not last:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(EtcdError):
            for key, event in read_events(self._etcd, self._keys, ETCD_SECONDS):
                if event.kind in WAITS and event.at >= self._since and key not in self._told:
                    self._told.add(key)
                    tell(event.text)
