"""What happened in a job, for people: a bounded log in etcd that every process writes to, and that displays read."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from graphft.errors import plain, plain_text
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Event
from graphft.runtime.etcd import EtcdError, delete_op
from graphft.runtime.etcd.model import Store

KEEP = 500
"""About so many events stay in etcd; each process's log file has all of its own."""
PRUNE_EVERY = 50


class Events:
    """Writes events. Losing one must never hurt the job: what etcd does not take goes to the log only.

    Texts may come from a user's exceptions: they are made plain, and cut to TEXT_LIMIT characters, fields as well.
    """

    def __init__(self, etcd: Store, keys: Keys, who: str) -> None:
        self.etcd, self.keys, self.who, self._count = etcd, keys, who, 0
        self.log = logging.getLogger("graphft")

    def emit(self, kind: str, text: str, **fields: Any) -> None:
        text = plain_text(text)
        self.log.info("%s", text)
        event = Event(time.time(), self.who, kind, text, plain(fields))
        self._count += 1
        try:
            key = f"{self.keys.events}{time.time_ns():020d}-{self.who.replace(' ', '-')}-{self._count}"
            self.etcd.put(key, msgspec.json.encode(event), deadline=1.0)
            if self._count % PRUNE_EVERY == 1:  # and hence by processes, too, that die young and start again
                self._prune()
        except EtcdError as error:
            self.log.warning("event not recorded in etcd: %s", error.message)

    def _prune(self) -> None:
        kvs = self.etcd.range(self.keys.events, keys_only=True, deadline=1.0).kvs
        for start in range(0, max(len(kvs) - KEEP, 0), 100):
            batch = kvs[start : min(start + 100, len(kvs) - KEEP)]
            self.etcd.txn([], [delete_op(kv.key) for kv in batch], deadline=1.0)


def read_events(etcd: Store, keys: Keys, deadline: float | None = None) -> list[tuple[str, Event]]:
    """(key, event) of the events that are kept, oldest first."""
    kvs = etcd.range(keys.events, deadline=deadline).kvs
    return [(kv.key, msgspec.json.decode(kv.value, type=Event)) for kv in kvs]
