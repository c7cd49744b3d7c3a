"""Looks after a job's processes, its status and its etcd, from their start to the end, and calls callbacks."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.callbacks.runner import CallbackRunner
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.coordination.result_files import epoch_of_table, read_validations, recorded_epoch
from graphft.runtime.coordination.status import ETCD_FULL, UNKNOWN_JOB, JobStatus, read_status
from graphft.runtime.etcd import EmbeddedEtcd, EtcdError, Store
from graphft.runtime.launcher.ending import tell
from graphft.runtime.launcher.process_ends import past_epoch
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.process.identity import Identity

if TYPE_CHECKING:
    from graphft.transpiler.job import Job

log = logging.getLogger("graphft")

STATUS_EVERY_SECONDS = 0.5
EXIT_GRACE_SECONDS = 30.0
ALARM_EVERY_SECONDS = 5.0
LOST_SECONDS = 60.0
"""For which etcd may know nothing of a job that it knew."""
LOOK_SECONDS = 1.0
"""For how long one read of the status may keep this process from looking after its children and etcd."""
LAST_SECONDS = 10.0
"""The same for the last one: a job that has just completed would be called failed where etcd is slow."""
ETCD_TRIES, SILENT_SECONDS, FULL_SECONDS = 5, 20.0, 2.0
"""The launcher's etcd may fail to start so often in a row; it may answer nothing for so long until it is started again;
and until a full disk is told."""


def supervise(
    supervisor: Supervisor,
    observers: Sequence[Callable[[JobStatus], None]],
    embedded: EmbeddedEtcd | None = None,
    *,
    brief: bool = False,
    begins: int = 0,
    every: float = STATUS_EVERY_SECONDS,
) -> JobStatus | None:
    """Looks after the processes until the job is over. Returns its last status; None if etcd never told one. `begins`:
    the step at which the job goes on; `every`: seconds from one look at its status to the next."""
    status, next_status, complete_at = None, 0.0, None
    look = _Look(supervisor.etcd, supervisor.keys, begins)
    keeper = EtcdKeeper(embedded, supervisor) if embedded is not None else None
    while not supervisor.all_done and not supervisor.failed:
        supervisor.step(0.2)
        if keeper is not None:
            keeper.step()
        if time.monotonic() < next_status:
            continue
        next_status = time.monotonic() + every
        seen = look(status, brief)
        if keeper is not None:
            keeper.heard(seen is not status)
        if seen is None:
            continue
        if seen is not status:
            supervisor.replace_frozen(_registered(seen))  # also when it is complete: what is stopped never ends
        status = seen
        supervisor.take_progress(status.step, sum(shard.get("applied", 0) for shard in status.pservers.values()))
        for observe in observers:
            observe(status)
        if status.state == "failed":
            supervisor.fail(status.failure or "a role reported that the job cannot go on")
        if status.state == "complete":
            complete_at = complete_at or time.monotonic()
            supervisor.take_back_orders()
            if time.monotonic() - complete_at > EXIT_GRACE_SECONDS:
                break
    last = look(status, deadline=LAST_SECONDS)
    if last is not None:
        for observe in observers:
            observe(last)
    return last


def _registered(status: JobStatus) -> set[Identity]:
    members = [*status.pservers.values(), *status.trainers.values(), *status.coordinators.values()]
    return {msgspec.convert(member["process"], Identity) for member in members}


class _Look:
    """Reads the status; returns the one before while etcd is away: the display waits, the job decides for itself."""

    def __init__(self, etcd: Store, keys: Keys, begins: int) -> None:
        self.etcd, self.keys, self.begins = etcd, keys, begins
        self._unknown_since: float | None = None
        self._full, self._next_alarm = False, 0.0

    def __call__(self, last: JobStatus | None, brief: bool = False, deadline: float = LOOK_SECONDS) -> JobStatus | None:
        try:
            found = read_status(self.etcd, self.keys, deadline=deadline, brief=brief, begins=self.begins)
        except EtcdError:
            return last
        except GraphftError as error:
            if last is None or error.rule != UNKNOWN_JOB:
                raise
            self._check_lost(error)
            return last
        self._unknown_since = None
        if time.monotonic() > self._next_alarm:
            self._next_alarm = time.monotonic() + ALARM_EVERY_SECONDS
            full = self.etcd.is_full()
            if full != self._full:
                self._full = full
                tell(ETCD_FULL if full else "etcd takes records again")
        return dataclasses.replace(found, etcd_full=True) if self._full else found

    def _check_lost(self, error: GraphftError) -> None:
        """Processes that lose their leases with etcd's data are started again, and record the job anew."""
        self._unknown_since = self._unknown_since or time.monotonic()
        if time.monotonic() - self._unknown_since > LOST_SECONDS:
            raise GraphftError(
                f"etcd has lost the records of job {self.keys.job}, and no process of it has made them again within "
                f"{LOST_SECONDS:.0f} s: its data were deleted, or are another etcd's",
                rule=UNKNOWN_JOB,
                help="run it again: it goes on from its newest checkpoint",
            ) from error


def why_failed(supervisor: Supervisor, status: JobStatus | None) -> str:
    """Returns "" if the job is complete."""
    if not supervisor.failed and status is not None and status.state == "complete":
        return ""
    return supervisor.failed or (status.failure if status is not None else "") or "it did not complete"


class EtcdKeeper:
    """Starts a launcher's own etcd again, with its data, if it has died or answers nothing. Where its disk is full,
    that is told, and the job goes on when there is room again."""

    def __init__(self, etcd: EmbeddedEtcd, supervisor: Supervisor) -> None:
        self._etcd, self._supervisor = etcd, supervisor
        self._silent_since: float | None = None
        self._failed, self._again_at = 0, 0.0
        self._full_told = False

    def heard(self, answered: bool) -> None:
        """Takes note: it has `answered` the last question, or has not."""
        self._silent_since = None if answered else self._silent_since or time.monotonic()
        self._full_told = self._full_told and not answered

    def step(self) -> None:
        """Called all the while."""
        now = time.monotonic()
        silent = now - self._silent_since if self._silent_since is not None else 0.0
        if silent > FULL_SECONDS and self._etcd.full_disk:
            self._tell_full()
        if now < self._again_at:
            return
        if not self._etcd.running:
            self._restart("died")
        elif silent > SILENT_SECONDS:
            self._restart(f"has not answered for {silent:.0f} s")

    def _tell_full(self) -> None:
        if not self._full_told:
            self._full_told = True
            tell(f"etcd cannot write: {self._etcd.full_disk}; the job waits for room")

    def _restart(self, why: str) -> None:
        if not self._etcd.has_data:
            raise EtcdError(
                f"etcd {why}, and its data in {self._etcd.data_dir} are gone: this run cannot go on",
                rule="etcd-data-gone",
                help="the job's folder was deleted while it ran? Put a copy of it "
                "back, if there is one, and start the job again: it goes on from its newest checkpoint",
            )
        if not self._full_told:
            log.warning("etcd %s, starting it again with its data", why)
        try:
            self._etcd.restart()
        except EtcdError as error:
            if error.rule == "disk-full":
                self._tell_full()
                self._again_at = time.monotonic() + FULL_SECONDS
                return
            self._failed += 1
            if self._failed == ETCD_TRIES:  # killed while it starts, say
                raise
            return
        self._failed, self._silent_since = 0, None
        self._supervisor.events.emit("etcd-restarted", f"etcd {why}; it was started again with its data")


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
