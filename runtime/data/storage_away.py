"""Storage that is away: which errors may pass by waiting, for how long to wait, and when a chunk is bad.

A read that failed is made again, with growing pauses. In between a record of another chunk of the same source is read,
its neighbour. An outage fails both; a chunk that fails while its neighbours can be read is bad.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

WAIT_SECONDS = 300.0
"""How long a trainer waits for storage that is away; ..."""
START_SECONDS = 60.0
"""... and how long one that opens its data, at its start."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds between two tries: each pause is twice the one before, less up to a half of it by chance."""
GOOD_NEIGHBOURS = 5
"""A chunk is bad when so many reads of neighbours have succeeded, and its own failed each time; not before 1.5 s."""
_STORAGE = frozenset(
    {"adlfs", "aiohttp", "azure", "botocore", "gcsfs", "google", "http", "requests", "s3fs", "urllib3"}
)
"""Packages whose exceptions tell of a network or a service, where they are no OSError."""


def is_of_storage(error: BaseException | None) -> bool:
    """True if the error, or one that caused it, is of storage or the network: it may be another one later."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) or any(
            str(base.__module__).partition(".")[0] in _STORAGE for base in type(error).__mro__
        ):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class Verdict(Enum):
    """Says what is to be done about a read that failed."""

    WAIT = "wait, and try again"
    BAD = "the chunk is bad: this is a failure of it"
    AWAY = "storage is away: nothing is the chunk's fault"


@dataclass(slots=True)
class Patience:
    """Decides about one read that fails again and again. `began`: when it failed first, in seconds; no clock here."""

    began: float
    limit: float = WAIT_SECONDS
    jitter: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    """A number from 0 to 1: trainers that wait for the same storage do not all ask at once."""
    tries: int = field(default=0, init=False)
    good: int = field(default=0, init=False)

    def failed(self, now: float, neighbour: bool | None) -> Verdict:
        """Judges a failure. `neighbour`: True if a record of another chunk could be read, None if there is none."""
        self.tries += 1
        self.good += neighbour is True
        if self.good >= GOOD_NEIGHBOURS:
            return Verdict.BAD
        if now - self.began < self.limit:
            return Verdict.WAIT
        return Verdict.AWAY if neighbour is False else Verdict.BAD

    @property
    def pause(self) -> float:
        """Seconds until the next try."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.tries, 20)) * (1 - self.jitter() / 2)
