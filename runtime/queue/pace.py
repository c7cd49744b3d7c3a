"""What a queue asks of the trainer that computes."""

from __future__ import annotations

from typing import Protocol


class Pace(Protocol):
    """How a trainer gets on. From any thread."""

    pass_index: int
    """The pass that it works on; -1 before its first."""

    @property
    def pace(self) -> float:
        """Batches per second of late."""

    def alive_since(self, then: float) -> bool:
        """Whether it has computed, or waited for others as it should, after this time of the monotonic clock."""
