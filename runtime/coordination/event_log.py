"""What happened in a job, for people: a bounded log in etcd that every process writes to, and that displays read."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import Any

import msgspec

from graphft.errors import GraphftError, plain, plain_text
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Event
from graphft.runtime.etcd import EtcdError, TransientEtcdError, delete_op
from graphft.runtime.etcd.model import Store

KEEP = 500
"""About so many events stay in etcd; each process's log file has all of its own."""
PRUNE_EVERY = 50
PUT_SECONDS = 1.0
"""For how long etcd may keep who writes events."""
LATE, AGAIN_SECONDS = 100, 2.0
"""The newest that etcd has not taken; and how often it is asked again to."""


class Events:
    """Writes events. Losing one must never hurt the job: what etcd does not take goes to the log, and to etcd later, if
    this process lives until then. Any thread may use it.

    Texts may come from a user's exceptions: they are made plain, and cut to TEXT_LIMIT characters, fields as well.
    """

    def __init__(self, etcd: Store, keys: Keys, who: str) -> None:
        self.etcd, self.keys, self.who, self._count = etcd, keys, who, 0
        self.log = logging.getLogger("graphft")
        self._late = deque[tuple[str, bytes]](maxlen=LATE)
        self._lock = threading.Lock()
        """Guards `_late`; held while etcd is asked."""
        self._again_at = 0.0

    def emit(self, kind: str, text: str, **fields: Any) -> None:
        text = plain_text(text)
        self.log.info("%s", text)
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
        """Now and then, or `at_once`: those that etcd has not taken so far. To be called all the while."""
        if self._late and (at_once or time.monotonic() >= self._again_at) and self._lock.acquire(at_once):
            try:
                self._put()
            finally:
                self._lock.release()

    def _put(self) -> None:
        """One that etcd has taken, though its answer is lost, is put again under the same key. Many take more than one
        call where etcd is slow: who makes it has leases and children to look after."""
        end = time.monotonic() + PUT_SECONDS
        while self._late and time.monotonic() < end:
            key, value = self._late[0]
            try:
                self.etcd.put(key, value, deadline=PUT_SECONDS)
            except TransientEtcdError as error:
                self._again_at = time.monotonic() + AGAIN_SECONDS
                self.log.warning("%d events not recorded in etcd so far: %s", len(self._late), error.message)
                return
            except EtcdError as error:  # nor will it take it later
                self.log.warning("event not recorded in etcd: %s", error.message)
            except GraphftError:  # another run has this name now
                self._late.clear()
                raise
            self._late.popleft()
        if self._late:
            self._again_at = time.monotonic() + AGAIN_SECONDS
            self.log.warning("%d events not recorded in etcd so far: it is slow", len(self._late))

    def _prune(self) -> None:
        kvs = self.etcd.range(self.keys.events, keys_only=True, deadline=1.0).kvs
        for start in range(0, max(len(kvs) - KEEP, 0), 100):
            batch = kvs[start : min(start + 100, len(kvs) - KEEP)]
            self.etcd.txn([], [delete_op(kv.key) for kv in batch], deadline=1.0)


def read_events(etcd: Store, keys: Keys, deadline: float | None = None) -> list[tuple[str, Event]]:
    """(key, event) of the events that are kept, oldest first."""
    kvs = etcd.range(keys.events, deadline=deadline).kvs
    return [(kv.key, msgspec.json.decode(kv.value, type=Event)) for kv in kvs]
