"""Says where the processes of a launcher are, and what they wait for, for displays in other processes.

One that waits for room has nothing in etcd of its own.
"""

from __future__ import annotations

import logging
import time
import uuid

import msgspec

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Ordered
from graphft.runtime.etcd import EtcdError, Store

log = logging.getLogger("graphft")

LEASE_SECONDS, RENEW_SECONDS, EVERY_SECONDS = 60, 15.0, 1.0
"""For how long what is told outlives its launcher; and between two renewals, two changes."""
ETCD_SECONDS = 1.0
"""For how long etcd may keep the launcher from its processes."""


class ProcessLocations:
    """The launcher's end. What etcd does not take is told later: no error hurts the job."""

    def __init__(self, etcd: Store, keys: Keys) -> None:
        self.etcd, self._key = etcd, keys.places_of(uuid.uuid4().hex[:8])
        self._told: list[Ordered] = []
        self._lease, self._renew_at, self._next = 0, 0.0, 0.0

    def publish(self, found: list[Ordered]) -> None:
        """To be called all the time."""
        now = time.monotonic()
        if now < self._next or (found == self._told and not (self._lease and now > self._renew_at)):
            return
        self._next = now + EVERY_SECONDS
        try:
            if not self._lease:
                self._lease, _ = self.etcd.lease_grant(LEASE_SECONDS, deadline=ETCD_SECONDS)
            else:
                self.etcd.lease_keepalive_once(self._lease, deadline=ETCD_SECONDS)
            self._renew_at = now + RENEW_SECONDS
            if found != self._told:
                self.etcd.put(self._key, msgspec.json.encode(found), self._lease, deadline=ETCD_SECONDS)
                self._told = found
        except EtcdError as error:
            log.debug("where processes are cannot be told now: %s", error.message)
            self._lease, self._told = 0, []
