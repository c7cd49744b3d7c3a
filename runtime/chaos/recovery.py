"""How long each fault kept a job from completing steps, and how many steps were done again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphft.runtime.chaos.probe import Answer
from graphft.runtime.coordination.job_view import JobView

IN_FLIGHT = 2
"""In the same generation, the step that was nearly done when the fault came proves nothing: the one after it does.
The same holds for an async shard's batches."""


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
    """By shard: its version when it first answered after the fault."""


@dataclass
class Recoveries:
    """Follows the versions of all shards. Times are of the monotonic clock."""

    shards: int
    total_steps: int
    all: list[Recovery] = field(default_factory=list)
    repeated: int = 0
    """Steps (async: batches, on each shard) that a rollback undid."""
    generations: int = 0
    low: int = 0
    """The lowest version among the shards; sync: when all were last seen in one generation."""
    progress_at: float = 0.0
    """When the job last got anywhere."""
    generation: int = 0

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
        self.take_generations(view, now)
        self.take_versions(answers)
        low = self.lowest(answers)
        if low is None:
            return []
        if low != self.low:
            self.low, self.progress_at = low, now
        over = []
        for recovery in self.open:
            since = max(recovery.at, recovery.since)
            fresh = {s: a for s, a in answers.items() if a.at > since and a.incarnation not in recovery.gone}
            if len(fresh) == self.shards and (low >= self.total_steps or self.is_over(recovery, fresh)):
                recovery.seconds = now - recovery.at
                over.append(recovery)
        return over

    def finish(self, now: float) -> None:
        """The job is complete."""
        for recovery in self.open:
            recovery.seconds = now - recovery.at

    def take_generations(self, view: JobView, now: float) -> None:
        raise NotImplementedError

    def take_versions(self, answers: Mapping[int, Answer]) -> None:
        raise NotImplementedError

    def lowest(self, answers: Mapping[int, Answer]) -> int | None:
        raise NotImplementedError

    def is_over(self, recovery: Recovery, answers: Mapping[int, Answer]) -> bool:
        raise NotImplementedError


@dataclass
class SyncRecoveries(Recoveries):
    """Of a sync job: its shards share a generation, and are at most one version apart."""

    _began: int | None = None
    """The step that the generation began at."""
    _highest: int = 0

    def take_generations(self, view: JobView, now: float) -> None:
        begun = view.generation
        if begun is None or (self._began is not None and begun.number <= self.generation):
            return
        if self._began is not None:
            self.repeated += max(0, self._highest - begun.step)
        self.generation, self._began, self._highest, self.progress_at = begun.number, begun.step, begun.step, now
        self.generations += 1

    def take_versions(self, answers: Mapping[int, Answer]) -> None:
        versions = [a.version for a in answers.values() if a.generation == self.generation]
        self._highest = max([self._highest, *versions])

    def lowest(self, answers: Mapping[int, Answer]) -> int | None:
        if len(answers) < self.shards or any(a.generation != self.generation for a in answers.values()):
            return None
        return min(a.version for a in answers.values())

    def is_over(self, recovery: Recovery, answers: Mapping[int, Answer]) -> bool:
        if self.generation > recovery.generation:
            return self.low > (self._began or 0)
        if not recovery.base:
            recovery.base = {s: a.version for s, a in answers.items()}
        return self.low >= max(recovery.base.values()) + IN_FLIGHT


@dataclass
class AsyncRecoveries(Recoveries):
    """Of an async job: each shard has a generation and a version of its own."""

    _generations: dict[int, int] = field(default_factory=dict)
    _highest: dict[int, int] = field(default_factory=dict)

    def take_generations(self, view: JobView, now: float) -> None:
        for shard, begun in view.shard_generations.items():
            known = self._generations.get(shard)
            if known is not None and begun.number <= known:
                continue
            if known is not None:
                self.repeated += max(0, self._highest.get(shard, 0) - begun.step)
            self._generations[shard], self._highest[shard], self.progress_at = begun.number, begun.step, now
            self.generations += 1
        self.generation = max(self._generations.values(), default=0)

    def take_versions(self, answers: Mapping[int, Answer]) -> None:
        for shard, answer in answers.items():
            if answer.generation == self._generations.get(shard):
                self._highest[shard] = max(self._highest[shard], answer.version)

    def lowest(self, answers: Mapping[int, Answer]) -> int | None:
        return min(a.version for a in answers.values()) if len(answers) == self.shards else None

    def is_over(self, recovery: Recovery, answers: Mapping[int, Answer]) -> bool:
        for shard, answer in answers.items():  # one that went back starts from where it is then
            recovery.base[shard] = min(recovery.base.get(shard, answer.version), answer.version)
        return all(a.version >= min(recovery.base[s] + IN_FLIGHT, self.total_steps) for s, a in answers.items())
