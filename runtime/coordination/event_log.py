"""Tells people of a job, by etcd: a bounded log of events, and where its processes are. The job never needs it."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import msgspec

from graphft.errors import plain, plain_text
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Event, Ordered
from graphft.runtime.etcd import EtcdError, delete_op
from graphft.runtime.etcd.model import Store

log = logging.getLogger("graphft")

KEEP = 500
"""About so many events stay in etcd; each process's log file has all of its own."""
PRUNE_EVERY = 50
PUT_SECONDS = 1.0
"""For how long etcd may delay a process that writes."""
LEASE_SECONDS, RENEW_SECONDS, EVERY_SECONDS = 60, 15.0, 1.0
"""For how long locations outlive their launcher; and between two renewals, two changes."""


class Events:
    """Writes events, to the log and to etcd. Any thread may use it. Texts, which may come from a user's exceptions, are
    made plain, and cut to TEXT_LIMIT characters."""

    log = log

    def __init__(self, etcd: Store, keys: Keys, who: str) -> None:
        self.etcd, self.keys, self.who, self._count = etcd, keys, who, 0

    def emit(self, kind: str, text: str, **fields: Any) -> None:
        """Tells of an event. One that etcd does not take within a second is in the log alone."""
        text = plain_text(text)
        log.info("%s", text)
        event = Event(time.time(), self.who, kind, text, plain(fields))
        self._count += 1
        key = f"{self.keys.events}{time.time_ns():020d}-{self.who.replace(' ', '-')}-{self._count}"
        try:
            self.etcd.put(key, msgspec.json.encode(event), deadline=PUT_SECONDS)
            if self._count % PRUNE_EVERY == 1:  # and hence by processes, too, that die young and start again
                self._prune()
        except EtcdError as error:
            log.warning("event not recorded in etcd: %s", error.message)

    def _prune(self) -> None:
        kvs = self.etcd.range(self.keys.events, keys_only=True, deadline=1.0).kvs
        for start in range(0, max(len(kvs) - KEEP, 0), 100):
            batch = kvs[start : min(start + 100, len(kvs) - KEEP)]
            self.etcd.txn([], [delete_op(kv.key) for kv in batch], deadline=1.0)


def read_events(etcd: Store, keys: Keys, deadline: float | None = None) -> list[tuple[str, Event]]:
    """Returns (key, event) of the events that are kept, oldest first."""
    kvs = etcd.range(keys.events, deadline=deadline).kvs
    return [(kv.key, msgspec.json.decode(kv.value, type=Event)) for kv in kvs]


class ProcessLocations:
    """Writes where the processes of a launcher are, and what they wait for."""

    def __init__(self, etcd: Store, keys: Keys) -> None:
        self.etcd, self._key = etcd, f"{keys.places}{uuid.uuid4().hex[:8]}"
        self._told: list[Ordered] = []
        self._lease, self._renew_at, self._next = 0, 0.0, 0.0

    def publish(self, found: list[Ordered]) -> None:
        """Writes them, if they have changed. It is called all the time."""
        now = time.monotonic()
        if now < self._next or (found == self._told and not (self._lease and now > self._renew_at)):
            return
        self._next = now + EVERY_SECONDS
        try:
            if not self._lease:
                self._lease, _ = self.etcd.lease_grant(LEASE_SECONDS, deadline=PUT_SECONDS)
            else:
                self.etcd.lease_keepalive_once(self._lease, deadline=PUT_SECONDS)
            self._renew_at = now + RENEW_SECONDS
            if found != self._told:
                self.etcd.put(self._key, msgspec.json.encode(found), self._lease, deadline=PUT_SECONDS)
                self._told = found
        except EtcdError as error:
            log.debug("process locations not recorded in etcd: %s", error.message)
            self._lease, self._told = 0, []
