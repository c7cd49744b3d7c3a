"""How long a job will still take, from the rate of its new steps."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0
"""The rate is that of the last minute; where steps take longer, that of the last two."""


class TimeLeft:
    """Seconds until a job's last step, from looks at the step that it is at.

    Only new steps count, those above all that were seen. After a fault a job repeats steps: until it is past its
    highest one, nothing is known, and the rate is measured anew from there. A job that stands still has ever more time
    left, and after a minute (where steps take longer: three of them) an unknown one.
    """

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._highest = -1
        self._rises: deque[tuple[float, int]] = deque()
        """When which step was seen first (seconds of a monotonic clock): of the last `window` seconds, or two."""

    def see(self, at: float, step: int, total: int | None) -> float | None:
        """One look, `at` seconds of a clock that never goes back. `total`: None where nobody knows the last step.
        Returns None where the time is unknown, 0 at the last step."""
        if step < self._highest:
            self._rises.clear()
        elif step > self._highest or not self._rises:
            self._highest = step
            self._rises.append((at, step))
        while len(self._rises) > 2 and self._rises[1][0] <= at - self._window:
            self._rises.popleft()
        if total is None:
            return None
        return 0.0 if step >= total else self._estimate(at, total)

    def _estimate(self, at: float, total: int) -> float | None:
        if len(self._rises) < 2:
            return None
        (began, first), (newest, last) = self._rises[0], self._rises[-1]
        taken, since = newest - began, at - newest
        per_rise = taken / (len(self._rises) - 1)
        if since > max(self._window, 3 * per_rise):
            return None
        late = max(0.0, since - per_rise)  # a step that takes longer than those before it
        return max(0.0, (total - last) * (taken + late) / (last - first) - (since - late))


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
