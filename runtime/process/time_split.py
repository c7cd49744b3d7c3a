"""Where the time of a trainer's main thread goes: seconds by what it was at, counted since the process began."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

Activity = Literal["computing", "data", "shards", "idle"]
"""computing: block step runs; data: it waits for a batch to be read; shards: it waits for parameters or answers of
pservers, and so for other trainers; idle: it has nothing to compute, loads, or proves itself."""


class TimeSplit:
    """Written by one thread, read by any. Seconds by `clock`, which does not go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[Activity, float] = {"computing": 0.0, "data": 0.0, "shards": 0.0, "idle": 0.0}
        self._now: tuple[Activity, float] = ("idle", clock())

    def at(self, activity: Activity) -> None:
        """From now on it is at this."""
        (before, since), now = self._now, self._clock()
        self._seconds[before] += now - since
        self._now = (activity, now)

    def read(self) -> dict[str, float]:
        """Seconds up to now. In the moment of a change the last piece may be missing: the next read has it."""
        seconds = self._seconds.copy()
        activity, since = self._now
        seconds[activity] += max(0.0, self._clock() - since)
        return {name: round(value, 4) for name, value in seconds.items()}
