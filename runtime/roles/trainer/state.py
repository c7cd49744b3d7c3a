"""What a trainer's main loop, its ports and its daemon thread share."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from graphft.ops.context import ChunkWork, NotYet
from graphft.runtime.process.progress import rate
from graphft.runtime.protocol.events import TrainerControl
from graphft.runtime.queue.chunk_queue import Pace

RATE_WINDOW = 50


@dataclass
class TrainerState(Pace):
    """Read by any thread. The main thread writes it, but for what the daemon thread finds: `control`, `addresses`,
    `lost_at`. `leaving` is set by a signal, which takes no lock."""

    leaving: bool = False
    """This trainer was asked to go."""
    control: deque[TrainerControl] = field(default_factory=deque)
    """Events that the daemon thread found, for the main thread to take in."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Where shards are reached, by incarnation."""
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
    """Why its next step is not wanted so far."""
    waiting: str = ""
    """What is waited for, in words, while storage is away."""
    pumped: float = field(default_factory=lambda: time.monotonic())
    """When the main thread looked after the shards last, and all that were asked had answered."""
    samples: int = 0
    times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    """Of the last batches: when each was computed, and its samples."""

    def computed(self, samples: int) -> None:
        """Counts a batch."""
        self.samples += samples
        self.careful = max(0, self.careful - 1)
        self.times.append((time.monotonic(), samples))

    # -- Pace ---------------------------------------------------------------------------------------------------

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
