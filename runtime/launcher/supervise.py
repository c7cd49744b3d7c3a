"""From the start of a job's processes to its end: they are looked after, and so is what the job says of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.etcd import EmbeddedEtcd, EtcdError, Store
from graphft.runtime.launcher.etcd_keeper import EtcdKeeper
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.process.identity import Identity

if TYPE_CHECKING:
    from graphft.runtime.launcher.display import Display

STATUS_EVERY_SECONDS = 0.5
EXIT_GRACE_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""For how long one read of the display may keep this process from looking after its children and etcd."""


def supervise(
    supervisor: Supervisor,
    etcd: Store,
    keys: Keys,
    display: Display | None,
    on_status: Callable[[Supervisor, JobStatus], None],
    embedded: EmbeddedEtcd | None,
    brief: bool,
) -> JobStatus | None:
    """Looks after the processes until the job is over. Returns its last status; None if etcd never told one."""
    status, next_status, complete_at = None, 0.0, None
    keeper = EtcdKeeper(embedded) if embedded is not None else None
    while not supervisor.all_done and not supervisor.failed:
        supervisor.step(0.2)
        if keeper is not None:
            keeper.step()
        if time.monotonic() < next_status:
            continue
        next_status = time.monotonic() + STATUS_EVERY_SECONDS
        seen = _look(etcd, keys, status, brief)
        if keeper is not None:
            keeper.heard(seen is not status)
        if seen is None:
            continue
        if seen is not status:
            supervisor.replace_frozen(_registered(seen))  # also when it is complete: what is stopped never ends
            if seen.state == "running" and embedded is not None:  # no process elsewhere can reach it
                supervisor.expect_trainers(bool(seen.trainers or seen.loading))
        status = seen
        supervisor.take_progress(status.step, sum(shard.get("applied", 0) for shard in status.pservers.values()))
        if display is not None:
            display.show(status)
        on_status(supervisor, status)
        if status.state == "failed":
            told = status.failure or "a role reported that the job cannot go on"
            supervisor.failed = supervisor.failed or told
        if status.state == "complete":
            complete_at = complete_at or time.monotonic()
            if time.monotonic() - complete_at > EXIT_GRACE_SECONDS:
                break
    last = _look(etcd, keys, status)
    if last is not None:
        on_status(supervisor, last)
    return last


def _registered(status: JobStatus) -> set[Identity]:
    members = [*status.pservers.values(), *status.trainers.values()]
    return {msgspec.convert(member["process"], Identity) for member in members}


def _look(etcd: Store, keys: Keys, last: JobStatus | None, brief: bool = False) -> JobStatus | None:
    try:
        return read_status(etcd, keys, deadline=LOOK_SECONDS, brief=brief)
    except EtcdError:
        return last  # etcd is away for a moment: the display waits, the job decides for itself


def why_failed(supervisor: Supervisor, status: JobStatus | None) -> str:
    """ "" if the job is complete."""
    if not supervisor.failed and status is not None and status.state == "complete":
        return ""
    return supervisor.failed or (status.failure if status is not None else "") or "it did not complete"
