"""The state that a trainer's main loop, its ports and its daemon thread share; its view of the shards."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphft.ops.context import ChunkWork, NotYet
from graphft.runtime.coordination.records import Registration
from graphft.runtime.process.progress import rate
from graphft.runtime.protocol.machine import Event
from graphft.runtime.protocol.sync_trainer import SyncTrainer
from graphft.runtime.queue.chunk_queue import Pace
from graphft.runtime.queue.sync_queue import Shards

RATE_WINDOW = 50
SILENT_SECONDS = 5.0
"""For which a shard may leave a question open."""


@dataclass
class TrainerState(Pace):
    """Read by any thread. The main thread writes it, but for what the daemon thread finds: `control`, `addresses`,
    `lost_at`. `leaving` is set by a signal, which takes no lock."""

    leaving: bool = False
    """This trainer was asked to go."""
    control: deque[Event] = field(default_factory=deque)
    """Events that the daemon thread found, for the main thread to take in."""
    addresses: dict[str, str] = field(default_factory=dict)
    """The addresses of shards, by incarnation."""
    lost_at: float = float("-inf")
    """When a slot was lost last, by the clock of `progress`."""
    counters: Counter[str] = field(default_factory=Counter)
    pass_index: int = -1
    work: ChunkWork | None = None
    """The batch that was read last; between a unit's last batch and its push, the unit."""
    unit: ChunkWork | None = None
    """The unit of local accumulation that its batches are of."""
    batch_samples: int = 0
    """Samples of what is pushed next."""
    careful: int = 0
    """So many batches are not read ahead."""
    paused: NotYet | None = None
    """The reason for which its next step is not wanted so far."""
    waiting: str = ""
    """The reason of a wait for storage, in words."""
    pumped: float = field(default_factory=lambda: time.monotonic())
    """When the main thread looked after the shards last, and all that were asked had answered."""
    samples: int = 0
    times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    """When each of the last batches was computed, and its samples."""

    def computed(self, samples: int) -> None:
        """Counts a batch."""
        self.samples += samples
        self.careful = max(0, self.careful - 1)
        self.times.append((time.monotonic(), samples))

    @property
    def pace(self) -> float:
        times = list(self.times)
        return rate(len(times) - 1, times[-1][0] - times[0][0]) if times else 0.0

    @property
    def rate(self) -> float:
        """Samples per second of late."""
        times = list(self.times)
        return rate(sum(n for _, n in times[1:]), times[-1][0] - times[0][0]) if times else 0.0

    def alive_since(self, then: float) -> bool:
        computed = bool(self.times) and self.times[-1][0] > then
        return computed or (self.pumped > then and not self.waiting)


class KnownShards:
    """Reads the protocol's machine, from any thread. The main thread steps it (`ShardLink`). `machine` has `step(event,
    now) -> effects`; None until the job has begun. `patience`: seconds for which a shard may leave a question open."""

    def __init__(self, patience: float = 0.0) -> None:
        self.machine: Any = None
        self.patience = max(SILENT_SECONDS, patience)

    def silent(self) -> tuple[int, ...]:
        """Returns the shards that have answered nothing for a while though they were asked."""
        return self.machine.silence.over(self.patience) if self.machine is not None else ()

    def meets(self, pservers: Mapping[int, Registration]) -> bool:
        """True if each of these shards has welcomed this trainer."""
        if self.machine is None:
            return not pservers
        connections = self.machine.connections
        return all(
            connections[s].introduced and connections[s].incarnation == record.id for s, record in pservers.items()
        )

    def met(self) -> int:
        """Returns how many shards have welcomed this trainer."""
        return sum(c.introduced for c in self.machine.connections) if self.machine is not None else 0


class SyncShards(KnownShards, Shards):
    """A sync trainer's: with the slots that it contributes for."""

    machine: SyncTrainer | None

    def slots(self) -> list[int]:
        return sorted(self.machine.slots) if self.machine is not None else []

    def claim_of(self, slot: int) -> int:
        return self.machine.slots[slot].claim if self.machine is not None else 0

    @property
    def generation(self) -> int:
        """The generation that this trainer is in; the view that its daemon watches may be ahead."""
        return self.machine.generation if self.machine is not None else -1

    def lowest(self) -> int:
        lowest = self.machine.lowest() if self.machine is not None else None
        return -1 if lowest is None else lowest

    @property
    def finished(self) -> bool:
        """True when every shard has the job's last version."""
        return self.machine is not None and self.machine.finished

    @property
    def work_changed(self) -> bool:
        """True when there is other work to do than what was begun, or none."""
        return self.machine is None or self.machine.work_changed
