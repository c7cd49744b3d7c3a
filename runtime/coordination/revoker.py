"""Ending the leases of processes that are known to be dead, so that no process waits for them to expire."""

from __future__ import annotations

import logging
import time

from graphft.runtime.coordination.job_view import read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EtcdError, Store
from graphft.runtime.process.identity import UNKNOWN, Identity

log = logging.getLogger("graphft")

ETCD_SECONDS = 2.0
"""For how long etcd may keep this process from looking after its children."""
LATE_SECONDS, LATE_EVERY_SECONDS = 0.5, 1.0
"""The same, for what could not be done at once and is tried again; and how often."""
DYING_SECONDS, POLL_SECONDS = 1.0, 0.02


def leases_of_processes(etcd: Store, keys: Keys, deadline: float | None = None) -> list[tuple[Identity, int]]:
    view = read_view(keys, etcd.range(keys.control, deadline=deadline).kvs)
    return [(r.process, lease) for r in view.registrations if (lease := view.leases[r.id])]


def revoke_dead(etcd: Store, keys: Keys) -> None:
    """Ends the leases of processes that are seen to be dead from here; those of a launcher that was just killed may be
    dying still."""
    end = time.monotonic() + DYING_SECONDS
    left = [(process, lease) for process, lease in leases_of_processes(etcd, keys) if process.visible]
    while left and time.monotonic() < end:
        for process, lease in [each for each in left if each[0].dead]:
            etcd.lease_revoke(lease)
            left.remove((process, lease))
        time.sleep(POLL_SECONDS)


class Revoker:
    """Revokes the leases of dead processes; if etcd does not answer, later: renewals that are on their way may reach it
    when it comes back."""

    def __init__(self, etcd: Store, keys: Keys) -> None:
        self.etcd, self.keys = etcd, keys
        self._left: list[Identity] = []
        self._next = 0.0

    def revoke(self, process: Identity) -> None:
        if not self.try_once(process, ETCD_SECONDS):
            self._left.append(process)
            self._next = time.monotonic() + LATE_EVERY_SECONDS

    def step(self) -> None:
        if not self._left or time.monotonic() < self._next:
            return
        while self._left and self.try_once(self._left[0]):
            self._left.pop(0)
        self._next = time.monotonic() + LATE_EVERY_SECONDS

    def try_once(self, process: Identity, deadline: float = LATE_SECONDS) -> bool:
        """Returns True if etcd answered, within `deadline` seconds for each call."""
        if process == UNKNOWN:
            return True  # it was never seen: its lease ends by itself
        try:
            for holder, lease in leases_of_processes(self.etcd, self.keys, deadline):
                if holder == process:
                    self.etcd.lease_revoke(lease, deadline=deadline)
            return True
        except EtcdError as error:
            log.warning("cannot revoke the lease of process %d: %s", process.pid, error.message)
            return False
