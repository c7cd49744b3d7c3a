"""A simulated world: one clock, one random generator, a store with watches, and a network that loses, repeats and
reorders. Everything that happens is a function of the seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ChunkKey = tuple[int, int]
"""(pass, chunk)"""
MAX_FAILURES = 2


class SimulationFailed(AssertionError):
    """A promise was broken; the message ends with the newest lines of the trace."""


class World:
    """Time in seconds. `trace` holds the newest lines of what happened."""

    def __init__(self, seed: int, trace: int = 4000) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.lines: deque[str] = deque(maxlen=trace)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def trace(self, who: str, text: str) -> None:
        self.lines.append(f"{self.now:8.3f} {who}: {text}")

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Runs until `until()`; fails when it does not come true within `limit` seconds of simulated time."""
        while not until():
            if not self._queue or self._queue[0][0] > limit:
                self.fail(f"nothing ended within {limit:.0f} s")
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def fail(self, what: str) -> None:
        raise SimulationFailed(what)


@dataclass
class Generation:
    number: int = 0
    step: int = 0


@dataclass
class Store:
    """What etcd and the checkpoint folder hold. Changes are atomic; everyone hears of them a little later."""

    world: World
    shards: int
    generation: Generation = field(default_factory=Generation)
    committed: int = 0
    """Step of the newest committed checkpoint."""
    checkpoints: dict[int, dict[int, Any]] = field(default_factory=dict)
    parts: dict[tuple[int, int], dict[int, Any]] = field(default_factory=dict)
    pservers: dict[int, Any] = field(default_factory=dict)
    trainers: dict[str, Any] = field(default_factory=dict)
    slots: dict[int, str] = field(default_factory=dict)
    claims: dict[int, int] = field(default_factory=dict)
    """By slot, the revision of its claim."""
    barred: dict[str, str] = field(default_factory=dict)
    """Trainers that work should not go to, and who says so."""
    revision: int = 0
    bars: int = 0
    """How often one was barred."""
    watchers: dict[str, Callable[[], None]] = field(default_factory=dict)
    rollbacks: int = 0
    holders: dict[ChunkKey, str] = field(default_factory=dict)
    """Who claimed a chunk last."""
    failures: dict[ChunkKey, tuple[int, int]] = field(default_factory=dict)
    """The batch of a chunk that failed last, and how often in a row."""
    discarded: dict[ChunkKey, int] = field(default_factory=dict)
    """Poison: the batch from which on a chunk is left out."""

    def changed(self) -> None:
        """Lets every watcher look again, each after a delay of its own."""
        for name in list(self.watchers):
            self.world.after(self.world.rng.uniform(0.001, 0.1), lambda n=name: self.watchers.get(n, _nothing)())

    def write_part(self, generation: int, step: int, shard: int, state: Any) -> None:
        """A shard's part of a checkpoint; committed with the last one, if the generation is still the same."""
        parts = self.parts.setdefault((generation, step), {})
        parts[shard] = state
        if len(parts) == self.shards and generation == self.generation.number and step > self.committed:
            self.committed, self.checkpoints[step] = step, dict(parts)
            self.world.trace("store", f"checkpoint {step} is committed in generation {generation}")
            self.changed()

    def roll_back(self, generation: int) -> None:
        if self.generation.number == generation:
            self.rollbacks += 1
            self.generation = Generation(generation + 1, self.committed)
            self.world.trace("store", f"generation {generation + 1} begins at step {self.committed}")
            self.changed()

    def claim(self, slot: int, trainer: str) -> bool:
        if slot in self.slots or trainer not in self.trainers:
            return False
        self.revision += 1
        self.slots[slot], self.claims[slot] = trainer, self.revision
        self.changed()
        return True

    def take(self, slot: int, claim: int, by: str) -> None:
        """Takes a slot away from its holder, who is barred."""
        if slot in self.slots and self.claims[slot] == claim:
            trainer = self.slots.pop(slot)
            self.bar(trainer, by)
            self.world.trace(by, f"takes slot {slot} from {trainer}")
            self.changed()

    def bar(self, trainer: str, by: str) -> None:
        if trainer in self.trainers and trainer not in self.barred:
            self.barred[trainer] = by
            self.bars += 1
            self.world.trace(by, f"bars {trainer}")
            self.changed()

    def unbar(self, trainer: str) -> None:
        if self.barred.pop(trainer, None) is not None:
            self.changed()

    def release(self, slot: int, trainer: str) -> None:
        if self.slots.get(slot) == trainer:
            del self.slots[slot]
            self.changed()

    def claim_chunk(self, key: ChunkKey, slot: int, trainer: str) -> bool:
        """Whether it is the trainer's now: only the slot's holder gets it."""
        if self.slots.get(slot) != trainer:
            return False
        self.holders[key] = trainer
        return True

    def report_failure(self, key: ChunkKey, batch: int, trainer: str) -> bool:
        """Whether that makes the chunk poison. Then a new generation begins, at the same moment."""
        if self.holders.get(key) != trainer:
            return False
        before = self.failures.get(key, (batch, 0))
        self.failures[key] = batch, (before[1] if before[0] == batch else 0) + 1
        if self.failures[key][1] < MAX_FAILURES:
            return False
        self.discarded[key] = batch
        self.world.trace("store", f"chunk {key} is discarded from batch {batch} on")
        self.roll_back(self.generation.number)
        return True

    def expire(self, trainer: str) -> None:
        """The trainer's lease ends: its registration and its slots go."""
        if self.trainers.pop(trainer, None) is not None:
            self.slots = {v: t for v, t in self.slots.items() if t != trainer}
            self.barred.pop(trainer, None)
            self.world.trace("store", f"{trainer}'s lease ended")
            self.changed()


def _nothing() -> None:
    pass


class Network:
    """Delivers messages between connected ends. Those in flight on a connection that breaks are lost."""

    def __init__(self, world: World, duplicates: float, reorder: bool) -> None:
        self.world, self.duplicates, self.reorder = world, duplicates, reorder
        self.blocked: Callable[[Any, Any], bool] = lambda link, message: False
        """Which messages of which links never arrive."""
        self._reconnects: dict[Any, int] = {}
        self._clear: dict[Any, float] = {}

    def send(self, link: Any, way: str, deliver: Callable[[], None]) -> None:
        """Delivers over `link` in direction `way`: in order, unless this network reorders."""
        rng, reconnects = self.world.rng, self._reconnects.get(link, 0)
        for _ in range(2 if rng.random() < self.duplicates else 1):
            at = self.world.now + rng.uniform(0.0005, 0.02) + (rng.random() < 0.02) * rng.uniform(0, 0.3)
            if not self.reorder:
                at = max(at, self._clear.get((link, way), 0.0))
                self._clear[link, way] = at
            self.world.after(
                at - self.world.now, lambda: deliver() if self._reconnects.get(link, 0) == reconnects else None
            )

    def cut(self, link: Any) -> None:
        self._reconnects[link] = self._reconnects.get(link, 0) + 1
