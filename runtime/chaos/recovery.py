"""How long each fault kept a job from completing steps, and how many steps were done again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphft.runtime.chaos.probe import Answer
from graphft.runtime.coordination.job_view import JobView

IN_FLIGHT = 2
"""The step that was nearly done when the fault came proves nothing: the one after it does."""


@dataclass(slots=True)
class Recovery:
    """One fault, and the seconds until the next step after it was complete on every shard; None while it is not.

    `alone`: the job had recovered from the fault before, all that had died were back, and it recovered from this one
    before the next; so the seconds tell of this one only. `gone`: incarnations of shards that it killed. Steps complete
    before `since` prove nothing.
    """

    kind: str
    what: str
    at: float
    version: int
    generation: int
    alone: bool
    gone: frozenset[str] = frozenset()
    since: float = 0.0
    seconds: float | None = None
    base: dict[int, int] = field(default_factory=dict)
    """By shard: the lowest version that it has answered with since the fault, hence where a rollback took it."""


@dataclass
class Recoveries:
    """Follows the versions of all shards, which share a generation (sync) or have one each (async). Times are of the
    monotonic clock."""

    shards: int
    total_steps: int
    all: list[Recovery] = field(default_factory=list)
    repeated: int = 0
    """Steps (async: batches, on each shard) that a rollback undid."""
    generations: int = 0
    low: int = 0
    """The lowest version among the shards when all were last seen in their newest generation."""
    progress_at: float = 0.0
    """When the job last got anywhere."""
    _generations: dict[int, int] = field(default_factory=dict)
    _highest: dict[int, int] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        return max(self._generations.values(), default=0)

    @property
    def open(self) -> list[Recovery]:
        return [r for r in self.all if r.seconds is None]

    def begin(self, kind: str, what: str, at: float, alone: bool, gone: frozenset[str] = frozenset()) -> Recovery:
        """A fault has befallen the job. What has not recovered by now from one before is not alone any more."""
        for other in self.open:
            other.alone = False
        recovery = Recovery(kind, what, at, self.low, self.generation, alone, gone)
        self.all.append(recovery)
        return recovery

    def update(self, answers: Mapping[int, Answer], view: JobView, now: float) -> list[Recovery]:
        """Takes in what is known now; returns the recoveries that are over with it."""
        self._take_generations(view, now)
        current = {s: a for s, a in answers.items() if a.generation == self._generations.get(s)}
        for shard, answer in current.items():
            self._highest[shard] = max(self._highest[shard], answer.version)
        if len(current) < self.shards:
            return []
        low = min(a.version for a in current.values())
        if low != self.low:
            self.low, self.progress_at = low, now
        over = [r for r in self.open if self._is_over(r, current)]
        for recovery in over:
            recovery.seconds = now - recovery.at
        return over

    def finish(self, now: float) -> None:
        """The job is complete."""
        for recovery in self.open:
            recovery.seconds = now - recovery.at

    def _take_generations(self, view: JobView, now: float) -> None:
        shared = view.generation if not view.shard_generations else None
        begun = dict.fromkeys(range(self.shards), shared) if shared is not None else view.shard_generations
        new = {s: g for s, g in begun.items() if g.number > self._generations.get(s, -1)}
        undone = [max(0, self._highest[s] - g.step) for s, g in new.items() if s in self._generations]
        self.repeated += max(undone, default=0) if shared is not None else sum(undone)
        for shard, generation in new.items():
            self._generations[shard], self._highest[shard] = generation.number, generation.step
            self.progress_at = now
        self.generations += bool(new) if shared is not None else len(new)

    def _is_over(self, recovery: Recovery, answers: Mapping[int, Answer]) -> bool:
        since = max(recovery.at, recovery.since)
        if any(a.at <= since or a.incarnation in recovery.gone for a in answers.values()):
            return False
        for shard, answer in answers.items():
            recovery.base[shard] = min(recovery.base.get(shard, answer.version), answer.version)
        return all(a.version >= min(recovery.base[s] + IN_FLIGHT, self.total_steps) for s, a in answers.items())
