"""From the start of a job's processes to its end: they are looked after, and so is what the job says of itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import ETCD_FULL, UNKNOWN_JOB, JobStatus, read_status
from graphft.runtime.etcd import EmbeddedEtcd, EtcdError, Store
from graphft.runtime.launcher.etcd_keeper import EtcdKeeper
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.launcher.tell import tell
from graphft.runtime.process.identity import Identity
from graphft.runtime.transport.address import is_loopback

STATUS_EVERY_SECONDS = 0.5
EXIT_GRACE_SECONDS = 30.0
ALARM_EVERY_SECONDS = 5.0
LOST_SECONDS = 60.0
"""For which etcd may know nothing of a job that it knew."""
LOOK_SECONDS = 1.0
"""For how long one read of the status may keep this process from looking after its children and etcd."""
LAST_SECONDS = 10.0
"""The same for the last one, when there is nothing else to look after: a job that has just completed would be called
failed where etcd is slow."""


def supervise(
    supervisor: Supervisor,
    etcd: Store,
    keys: Keys,
    on_status: Callable[[Supervisor, JobStatus], None],
    embedded: EmbeddedEtcd | None,
    brief: bool,
    begins: int,
    every: float = STATUS_EVERY_SECONDS,
) -> JobStatus | None:
    """Looks after the processes until the job is over. Returns its last status; None if etcd never told one. `begins`:
    the step at which the job goes on; `every`: seconds from one look at its status to the next."""
    status, next_status, complete_at = None, 0.0, None
    look = _Look(etcd, keys, begins)
    keeper = EtcdKeeper(embedded, supervisor.etcd_restarted) if embedded is not None else None
    alone = embedded is not None and is_loopback(embedded.host)  # no process elsewhere can reach it
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
            if seen.state == "running" and alone:
                supervisor.expect_trainers(bool(seen.trainers or seen.loading))
        status = seen
        supervisor.take_progress(status.step, sum(shard.get("applied", 0) for shard in status.pservers.values()))
        on_status(supervisor, status)
        if status.state == "failed":
            told = status.failure or "a role reported that the job cannot go on"
            supervisor.failed = supervisor.failed or told
        if status.state == "complete":
            complete_at = complete_at or time.monotonic()
            supervisor.take_back_orders()
            if time.monotonic() - complete_at > EXIT_GRACE_SECONDS:
                break
    last = look(status, deadline=LAST_SECONDS)
    if last is not None:
        on_status(supervisor, last)
    return last


def _registered(status: JobStatus) -> set[Identity]:
    members = [*status.pservers.values(), *status.trainers.values(), *status.coordinators.values()]
    return {msgspec.convert(member["process"], Identity) for member in members}


class _Look:
    """Reads the status; the one before while etcd is away: the display waits, the job decides for itself."""

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
        self._look_for_alarm()
        return dataclasses.replace(found, etcd_full=True) if self._full else found

    def _look_for_alarm(self) -> None:
        """Now and then, and says once what has changed."""
        if time.monotonic() < self._next_alarm:
            return
        self._next_alarm = time.monotonic() + ALARM_EVERY_SECONDS
        full = self.etcd.is_full()
        if full != self._full:
            self._full = full
            tell(ETCD_FULL if full else "etcd takes records again")

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
    """ "" if the job is complete."""
    if not supervisor.failed and status is not None and status.state == "complete":
        return ""
    return supervisor.failed or (status.failure if status is not None else "") or "it did not complete"
