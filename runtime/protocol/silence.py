"""Which shards do not answer: how long each has left a question open, as far as its trainer listened meanwhile.

    silence.asked(shard); silence.heard(shard)    # as messages go and come
    silence.look(now)                             # at each tick
    silence.over(5.0)                             # shards that have answered nothing for 5 s

A trainer that computes does not listen: answers may lie there for a minute. So a look counts one second at most.
"""

from __future__ import annotations

LOOK_SECONDS = 1.0


class Silence:
    """`over` may be called from any thread."""

    def __init__(self, shards: int) -> None:
        self._open = [False] * shards
        self._seconds = [0.0] * shards
        self._looked: float | None = None

    def asked(self, shard: int) -> None:
        """A question was sent that a shard which serves answers at once."""
        self._open[shard] = True

    def heard(self, shard: int) -> None:
        """Something came from the shard; or it is gone, and nothing is expected of it."""
        self._open[shard], self._seconds[shard] = False, 0.0

    def look(self, now: float) -> None:
        """Takes in the time. To be called when what has arrived is taken in."""
        passed = min(now - self._looked, LOOK_SECONDS) if self._looked is not None else 0.0
        self._looked = now
        for shard, is_open in enumerate(self._open):
            if is_open:
                self._seconds[shard] += passed

    def over(self, seconds: float) -> tuple[int, ...]:
        """Shards that have been silent for longer."""
        return tuple(shard for shard, silent in enumerate(self._seconds) if silent > seconds)
