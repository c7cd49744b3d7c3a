"""What a launcher says to the person who started it, also when it is quiet."""

from __future__ import annotations

import contextlib
import sys
import time

from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EtcdError
from graphft.runtime.etcd.model import Store

WAITS = {"storage-unavailable", "storage-wait", "damaged-checkpoint", "cannot-start"}
"""Kinds of events without which a job that waits looks like one that hangs."""
LOOK_SECONDS, ETCD_SECONDS = 2.0, 1.0


def tell(line: str) -> None:
    """One line on stderr: a program that reads what a script prints is not disturbed. Nothing is raised."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or none: there is nobody to tell
        return


class WaitsOfQuietLaunch:
    """An observer of a launch that shows no panel: tells what the job waits for, each event once.

    `since`: Unix seconds when the launch began; events before that are of another.
    """

    def __init__(self, etcd: Store, keys: Keys, since: float) -> None:
        self._etcd, self._keys, self._since = etcd, keys, since
        self._told: set[str] = set()
        self._next_look = 0.0

    def look(self, _: object = None, last: bool = False) -> None:
        """Looks now and then; for the `last` time at once."""
        if time.monotonic() < self._next_look and not last:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(EtcdError):
            for key, event in read_events(self._etcd, self._keys, ETCD_SECONDS):
                if event.kind in WAITS and event.at >= self._since and key not in self._told:
                    self._told.add(key)
                    tell(event.text)
