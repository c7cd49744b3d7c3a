"""One role of a job that a launcher keeps running: what became of its processes, and when the next one is started."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from graphft.runtime.engines.base import Order, Process
from graphft.runtime.process.identity import UNKNOWN, Identity

BACKOFF_SECONDS, BACKOFF_LIMIT = 0.25, 10.0
QUICK_FAILURE_SECONDS = 30.0
"""Failures after less than this are in a row: each doubles the delay before the next start."""
QUICK_PREEMPTION_SECONDS = 5.0
"""So are preemptions: a process that is killed whenever it starts (out of memory, say) must not burn the machine."""
ROOM_SECONDS, ROOM_LIMIT = 0.5, 30.0
"""Before an order is given again that the engine did not take (no room on any machine, a folder that cannot be
written): twice as long each time, at most `ROOM_LIMIT`, and by chance down to half of it."""


@dataclass(slots=True)
class Child:
    """One role of the job on this machine, over all of its processes."""

    role: str
    index: int
    process: Process | None = None
    failures: int = 0
    preemptions: int = 0
    in_a_row: int = 0
    stuck: int = 0
    """Failures since the job last made progress."""
    failed_at: int = -1
    death: str = ""
    """How it failed last, in words; and when, by the monotonic clock."""
    died_at: float = 0.0
    died_pid: int = 0
    """Of the process that failed last."""
    died_started: float = 0.0
    """When that one was started."""
    started_at: float = 0.0
    restart_at: float | None = None
    identity: Identity = UNKNOWN
    """Of its process, once that exists."""
    registered: Identity = UNKNOWN
    """Its process that was registered last."""
    gone_at: float | None = None
    """Since when that process is not registered any more."""
    done: bool = False
    peak: int = 0
    """The most memory that its process was seen to use, in bytes."""

    refused: int = 0
    """How often in a row the engine did not take the order of a process."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    def order(self, endpoints: str) -> Order:
        return Order(self.role, self.index, endpoints)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def preempt(self) -> None:
        """Its process was ended from outside."""
        self.preemptions += 1
        self._count_in_a_row(QUICK_PREEMPTION_SECONDS)

    def fail(self, progress: int, counts: bool, queue_ends_it: bool) -> None:
        """Its process failed, when the job had made this progress. `counts`: against the process, and not against a
        batch. `queue_ends_it`: after some failures the batch is left out, or the job ends."""
        self.failures += 1
        if counts:
            self.stuck = self.stuck + 1 if progress <= self.failed_at else 1
            self.failed_at = progress
        self._count_in_a_row(0.0 if queue_ends_it else QUICK_FAILURE_SECONDS)

    def _count_in_a_row(self, quick: float) -> None:
        self.in_a_row = self.in_a_row + 1 if time.monotonic() - self.started_at < quick else 1

    def delay(self, at_once: bool) -> float:
        """Seconds before it is started again. `at_once`: the first time in a row."""
        if at_once and self.in_a_row == 1:
            return 0.0
        return min(BACKOFF_SECONDS * 2 ** min(self.in_a_row - 1, 10), BACKOFF_LIMIT)

    def restart_in(self, seconds: float) -> None:
        self.restart_at = time.monotonic() + seconds

    def await_room(self) -> bool:
        """The engine has not taken the order: it is given again, later and later, and not by all children at once.
        Returns whether people are to be told."""
        delay = min(ROOM_SECONDS * 2**self.refused, ROOM_LIMIT) * (1 - random.random() / 2)
        self.refused += 1
        self.restart_in(delay)
        return self.refused == 1 or delay > ROOM_LIMIT / 2
