"""What a trainer knows of its shards, for its queue, its daemon thread and its log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphft.runtime.coordination.records import Registration
from graphft.runtime.protocol.sync_trainer import SyncTrainer
from graphft.runtime.queue.sync_queue import Shards

SILENT_SECONDS = 5.0
"""For which a shard may leave a question open."""


class KnownShards:
    """Reads the protocol's machine, from any thread. The main thread steps it (`ShardLink`).

    `machine` has `step(event, now) -> effects`; None until the job has begun. `patience`: seconds for which a shard may
    leave a question open.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.machine: Any = None
        self.patience = max(SILENT_SECONDS, patience)

    def silent(self) -> tuple[int, ...]:
        """Shards that have answered nothing for a while though they were asked."""
        return self.machine.silence.over(self.patience) if self.machine is not None else ()

    def meets(self, pservers: Mapping[int, Registration]) -> bool:
        """Whether each of these shards has welcomed this trainer."""
        if self.machine is None:
            return not pservers
        connections = self.machine.connections
        return all(
            connections[s].introduced and connections[s].incarnation == record.id for s, record in pservers.items()
        )

    def met(self) -> int:
        """How many shards have welcomed this trainer."""
        return sum(c.introduced for c in self.machine.connections) if self.machine is not None else 0

    def story(self) -> list[str]:
        """What the machine was told of late, oldest first."""
        return self.machine.story.of() if self.machine is not None else []


class SyncShards(KnownShards, Shards):
    """A sync trainer's: with the slots that it contributes for."""

    machine: SyncTrainer | None

    def slots(self) -> list[int]:
        return sorted(self.machine.slots) if self.machine is not None else []

    def claim_of(self, slot: int) -> int:
        """The revision of the claim that a held slot is this trainer's by."""
        return self.machine.slots[slot].claim if self.machine is not None else 0

    @property
    def generation(self) -> int:
        """The one that this trainer is in; the view that its daemon watches may be ahead."""
        return self.machine.generation if self.machine is not None else -1

    def lowest(self) -> int:
        lowest = self.machine.lowest() if self.machine is not None else None
        return -1 if lowest is None else lowest

    @property
    def finished(self) -> bool:
        """Whether every shard has the job's last version."""
        return self.machine is not None and self.machine.finished

    @property
    def work_changed(self) -> bool:
        """Whether there is other work to do than what was begun, or none."""
        return self.machine is None or self.machine.work_changed
