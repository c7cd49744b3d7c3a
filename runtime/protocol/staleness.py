"""How stale the gradients are that a shard applies."""

from __future__ import annotations

SHOWN = 16


class Staleness:
    """Counts applied batches by staleness: by how many versions the parameters had moved on since the gradient's."""

    def __init__(self) -> None:
        self.counts = [0] * (SHOWN + 1)
        """Of staleness 0 to 15, and of all above."""
        self.max = self._sum = 0

    def add(self, staleness: int) -> None:
        self.counts[min(staleness, SHOWN)] += 1
        self.max = max(self.max, staleness)
        self._sum += staleness

    @property
    def mean(self) -> float:
        return self._sum / max(1, sum(self.counts))
