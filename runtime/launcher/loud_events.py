"""Events without which a job that waits looks like one that hangs: told also by a launch that is to be quiet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EtcdError
from graphft.runtime.etcd.model import Store

KINDS = {"storage-unavailable", "storage-wait", "damaged-checkpoint", "checkpoint-gone", "cannot-start", "folder-gone"}
KINDS |= {"validation-lost", "stopped-early"}
LOOK_SECONDS, ETCD_SECONDS = 2.0, 1.0


class LoudEvents:
    """Those of this launch, once each. `since`: Unix seconds, when it began."""

    def __init__(self, etcd: Store, keys: Keys, since: float, tell: Callable[[str], None]) -> None:
        self._etcd, self._keys, self._since, self._tell = etcd, keys, since, tell
        self._told: set[str] | None = None
        self._next_look = 0.0

    def look(self, last: bool = False) -> None:
        """Now and then; the `last` look is taken at once."""
        if time.monotonic() < self._next_look and not last:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(EtcdError):
            found = [(key, e) for key, e in read_events(self._etcd, self._keys, ETCD_SECONDS) if e.kind in KINDS]
            if self._told is None:
                self._told = {key for key, event in found if event.at < self._since}
            for key, event in found:
                if key not in self._told:
                    self._told.add(key)
                    self._tell(event.text)
