"""The shards' exchange of partial sums (clipping by global norm): what is known of this step, and of the one before."""

from __future__ import annotations

from typing import Any


class PartialSums:
    """Partial sums by shard. The own ones are remembered for the step before too: a peer may still ask for them.

    None stands for "no contribution": the shard closed that step without data.
    """

    def __init__(self, shard: int, shards: int) -> None:
        self.shard, self.shards = shard, shards
        self.own: dict[int, Any] = {}
        self._others: dict[int, Any] = {}

    def offer(self, step: int, payload: Any) -> None:
        """The own partial sums of the step that closes."""
        self.own[step] = payload

    def keep(self, shard: int, payload: Any) -> bool:
        """Another shard's for the current step. False: it is here already."""
        if shard in self._others:
            return False
        self._others[shard] = payload
        return True

    def missing(self) -> tuple[int, ...]:
        return tuple(s for s in range(self.shards) if s != self.shard and s not in self._others)

    def ordered(self, step: int) -> tuple[Any, ...]:
        """All shards' partial sums of the step, in shard order."""
        return tuple(self.own[step] if s == self.shard else self._others[s] for s in range(self.shards))

    def advance(self, step: int) -> None:
        """`step` is closed: remembers its own sums, forgets older ones and the others'."""
        self.own = {step: self.own.get(step)}
        self._others = {}
