"""How long each fault kept a job from completing steps, and how many steps were done again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphft.runtime.chaos.probe import Answer
from graphft.runtime.commit import Epoch

IN_FLIGHT = 2
"""In the same generation, the step that was nearly done when the fault came proves nothing: the one after it does."""


@dataclass(slots=True)
class Recovery:
    """One fault, and the seconds until the next step after it was complete on every shard; None while it is not.

    `alone`: the job had recovered from the fault before, and whoever had died was back, so the seconds tell of this one
    only. `gone`: incarnations of shards that it killed.
    """

    kind: str
    what: str
    at: float
    version: int
    generation: int
    alone: bool
    gone: frozenset[str] = frozenset()
    seconds: float | None = None
    base: int | None = None


@dataclass
class Recoveries:
    """Follows the versions of all shards. Times are of the monotonic clock."""

    shards: int
    total_steps: int
    all: list[Recovery] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    """The step that each generation began at."""
    repeated: int = 0
    low: int = 0
    """The lowest version among the shards, when all were last seen in one generation."""
    progress_at: float = 0.0
    """When the job last got anywhere."""
    _highest: int = 0

    @property
    def generation(self) -> int:
        return max(self.epochs, default=0)

    @property
    def open(self) -> list[Recovery]:
        return [r for r in self.all if r.seconds is None]

    def begin(self, kind: str, what: str, at: float, alone: bool, gone: frozenset[str] = frozenset()) -> Recovery:
        """A fault has befallen the job."""
        recovery = Recovery(kind, what, at, self.low, self.generation, alone, gone)
        self.all.append(recovery)
        return recovery

    def update(self, answers: Mapping[int, Answer], epoch: Epoch | None, now: float) -> list[Recovery]:
        """Takes in what is known now; returns the recoveries that are over with it."""
        if epoch is not None and epoch.generation not in self.epochs:
            if self.epochs:
                self.repeated += max(0, self._highest - epoch.step)
            self.epochs[epoch.generation] = epoch.step
            self._highest, self.progress_at = epoch.step, now
        for answer in answers.values():
            if answer.generation == self.generation:
                self._highest = max(self._highest, answer.version)
        low = self._common(answers)
        if low is None:
            return []
        if low != self.low:
            self.low, self.progress_at = low, now
        over = [r for r in self.open if self._is_over(r, answers, low)]
        for recovery in over:
            recovery.seconds = now - recovery.at
        return over

    def finish(self, now: float) -> None:
        """The job is complete."""
        for recovery in self.open:
            recovery.seconds = now - recovery.at

    def _common(self, answers: Mapping[int, Answer]) -> int | None:
        """The lowest version, if all shards answer from the newest generation."""
        if len(answers) < self.shards or any(a.generation != self.generation for a in answers.values()):
            return None
        return min(a.version for a in answers.values())

    def _is_over(self, recovery: Recovery, answers: Mapping[int, Answer], low: int) -> bool:
        if any(a.at <= recovery.at or a.incarnation in recovery.gone for a in answers.values()):
            return False
        if low >= self.total_steps:
            return True
        if self.generation > recovery.generation:
            return low > self.epochs[self.generation]
        if recovery.base is None:
            recovery.base = max(a.version for a in answers.values())
        return low >= recovery.base + IN_FLIGHT
