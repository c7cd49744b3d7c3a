"""How many steps a job makes in a second, of late, and how long those that are left will take."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0
"""The pace is that of the last minute of training; where steps take longer, that of the last two steps."""


class StepPace:
    """Steps per second of training, from what each interval of training came to. Time in which a job does not train
    (it recovers, waits for its next pass) is not told here, and changes nothing. Steps that are computed again count:
    they take as long as new ones.

    A job that trains and makes no step has ever more time left, and after a minute (where steps take longer: three of
    them) an unknown one.
    """

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._now, self._made = 0.0, 0
        self._rises: deque[tuple[float, int]] = deque([(0.0, 0)])
        """After how many seconds of training how many steps were made: of the last `window` seconds, or two."""

    def train(self, seconds: float, steps: int) -> None:
        """An interval of training, in which so many steps ended."""
        self._now += seconds
        self._made += steps
        if steps:
            self._rises.append((self._now, self._made))
        while len(self._rises) > 2 and self._rises[1][0] <= self._now - self._window:
            self._rises.popleft()

    @property
    def per_second(self) -> float:
        """0 where it is unknown."""
        (began, first), (newest, last) = self._rises[0], self._rises[-1]
        taken, since, per_rise = newest - began, self._now - newest, self._per_rise
        if taken <= 0 or since > max(self._window, 3 * per_rise):
            return 0.0
        late = max(0.0, since - per_rise)  # a step that takes longer than those before it
        return (last - first) / (taken + late)

    def left(self, steps: int) -> float | None:
        """Seconds that so many steps will take; None where the pace is unknown."""
        pace = self.per_second
        if not pace:
            return None
        since = self._now - self._rises[-1][0]
        return max(0.0, steps / pace - min(since, self._per_rise))

    @property
    def _per_rise(self) -> float:
        """Seconds between two looks at which there were new steps."""
        return (self._rises[-1][0] - self._rises[0][0]) / max(1, len(self._rises) - 1)


def in_words(seconds: float) -> str:
    """As people say it: "45 s", "12 min", "3 h 05 min", "2 d 04 h"."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24:02} h"
