"""A prefix of the store, kept up to date by lists and events. Pure: no threads, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from graphft.runtime.etcd.model import KV, Event, RangeResult, WatchBatch


@dataclass(slots=True)
class View:
    """`kvs` is the prefix as of `revision`. Both methods return the events that lead from the old state to the new.

    A key deleted and made again between two lists shows as a delete and a put; changes in between that left no
    trace are not reported, so events say what is true now, not how often something happened.
    """

    kvs: dict[str, KV] = field(default_factory=dict)
    revision: int = 0

    def relist(self, listed: RangeResult) -> list[Event]:
        """Replace the state by a full list of the prefix."""
        new = {kv.key: kv for kv in listed.kvs}
        events = list(self._differences(new, listed.revision))
        self.kvs, self.revision = new, listed.revision
        return events

    def apply(self, batch: WatchBatch) -> list[Event]:
        """Apply a watch's events; those that the state holds already are left out."""
        applied = []
        for event in batch.events:
            if event.kv.mod_revision <= self.revision:
                continue
            prev = self.kvs.get(event.kv.key)
            if event.kind == "put":
                self.kvs[event.kv.key] = event.kv
            else:
                self.kvs.pop(event.kv.key, None)
            applied.append(replace(event, prev=prev))
        if batch.events:
            self.revision = max(self.revision, batch.events[-1].kv.mod_revision)
        return applied

    def _differences(self, new: dict[str, KV], revision: int) -> Iterable[Event]:
        for key, kv in self.kvs.items():
            if key not in new or new[key].create_revision != kv.create_revision:
                yield Event("delete", KV(key, b"", 0, revision, 0), kv)
        for key, kv in sorted(new.items(), key=lambda item: item[1].mod_revision):
            old = self.kvs.get(key)
            if old is None or old.create_revision != kv.create_revision:
                yield Event("put", kv)
            elif old != kv:  # by more than its revision: a store that was restored gives revisions again
                yield Event("put", kv, old)
