"""The protocol's machines, watched: each checks its invariants after every event, and shards tell what they apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphft.runtime.protocol.async_shard import AsyncShard
from graphft.runtime.protocol.async_trainer import AsyncTrainer
from graphft.runtime.protocol.events import ApplyRound
from graphft.runtime.protocol.sync_shard import SyncShard
from graphft.runtime.protocol.sync_trainer import SyncTrainer

Applied = Callable[[int, int, int, tuple[tuple[int, int], ...]], None]
"""`applied(generation, step, shard, contributions)`; a contribution is (slot, samples)."""


def watched(applied: Applied) -> dict[Any, Any]:
    """By class, what stands in for it."""
    return {machine: _checked(machine) for machine in (AsyncShard, AsyncTrainer, SyncTrainer)} | {
        SyncShard: _recorded(_checked(SyncShard), applied)
    }


def _checked(machine: Any) -> Any:
    class Checked(machine):  # type: ignore[misc]
        def step(self, event: Any, now: float) -> Any:
            effects = super().step(event, now)
            self.check_invariants()
            return effects

    return Checked


def _recorded(machine: Any, applied: Applied) -> Any:
    class Recorded(machine):  # type: ignore[misc]
        def step(self, event: Any, now: float) -> Any:
            effects = super().step(event, now)
            for effect in effects:
                if isinstance(effect, ApplyRound):
                    given = tuple((c.slot, c.samples) for c in effect.contributions)
                    applied(effect.generation, effect.step, self.options.shard, given)
            return effects

    return Recorded
