"""What people are shown of a job, by etcd: a bounded log of events, and where its processes are. Losing it never hurts
the job."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from typing import Any

import msgspec

from graphft.errors import GraphftError, plain, plain_text
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Event, Ordered
from graphft.runtime.etcd import EtcdError, TransientEtcdError, delete_op
from graphft.runtime.etcd.model import Store

log = logging.getLogger("graphft")

KEEP = 500
"""About so many events stay in etcd; each process's log file has all of its own."""
PRUNE_EVERY = 50
PUT_SECONDS = 1.0
"""For how long etcd may delay a process that writes."""
LATE, AGAIN_SECONDS = 100, 2.0
"""The newest that etcd has not taken; and how often they are put again."""
LEASE_SECONDS, RENEW_SECONDS, EVERY_SECONDS = 60, 15.0, 1.0
"""For how long locations outlive their launcher; and between two renewals, two changes."""


class Events:
    """Writes events. Those that etcd does not take go to the log, and to etcd later, if this process lives until then.
    Any thread may use it.

    Texts may come from a user's exceptions: they are made plain, and cut to TEXT_LIMIT characters, fields as well.
    """

    log = log

    def __init__(self, etcd: Store, keys: Keys, who: str) -> None:
        self.etcd, self.keys, self.who, self._count = etcd, keys, who, 0
        self._late = deque[tuple[str, bytes]](maxlen=LATE)
        self._lock = threading.Lock()
        """Guards `_late`; held during calls to etcd."""
        self._again_at = 0.0

    def emit(self, kind: str, text: str, **fields: Any) -> None:
        text = plain_text(text)
        log.info("%s", text)
        event = Event(time.time(), self.who, kind, text, plain(fields))
        self._count += 1
        key = f"{self.keys.events}{time.time_ns():020d}-{self.who.replace(' ', '-')}-{self._count}"
        with self._lock:
            self._late.append((key, msgspec.json.encode(event)))
            self._put()
        if self._count % PRUNE_EVERY == 1:  # and hence by processes, too, that die young and start again
            with contextlib.suppress(EtcdError):
                self._prune()

    def again(self, at_once: bool = False) -> None:
        """Puts those that etcd has not taken so far, now and then, or `at_once`. To be called all the while."""
        if self._late and (at_once or time.monotonic() >= self._again_at) and self._lock.acquire(at_once):
            try:
                self._put()
            finally:
                self._lock.release()

    def _put(self) -> None:
        """One that etcd has taken, though its answer is lost, is put again under the same key. Many take more than one
        call where etcd is slow: the caller has leases and children to look after."""
        end = time.monotonic() + PUT_SECONDS
        why = "it is slow"
        while self._late and time.monotonic() < end:
            key, value = self._late[0]
            try:
                self.etcd.put(key, value, deadline=PUT_SECONDS)
            except TransientEtcdError as error:
                why = error.message
                break
            except EtcdError as error:  # nor will it take it later
                log.warning("event not recorded in etcd: %s", error.message)
            except GraphftError:  # another run has this name now
                self._late.clear()
                raise
            self._late.popleft()
        if self._late:
            self._again_at = time.monotonic() + AGAIN_SECONDS
            log.warning("%d events not recorded in etcd so far: %s", len(self._late), why)

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
    """Writes where the processes of a launcher are, and what they wait for: one that waits for room has nothing in etcd
    of its own."""

    def __init__(self, etcd: Store, keys: Keys) -> None:
        self.etcd, self._key = etcd, keys.places_of(uuid.uuid4().hex[:8])
        self._told: list[Ordered] = []
        self._lease, self._renew_at, self._next = 0, 0.0, 0.0

    def publish(self, found: list[Ordered]) -> None:
        """Writes the events that etcd did not take so far. It is called all the time."""
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
