"""Judges trainers of which nothing comes, and whether deaths of processes are failures of their batches.

A trainer may live and mark progress while the network loses all that it sends to a shard: `IdleSlots` is the net below
leases, and below what a trainer knows of itself.

A segmentation fault is the batch's fault at once. SIGKILL comes from schedulers, and from the kernel when memory is
short: it is the batch's fault only if it comes again and again at the same batch, while nothing else dies. A process
that reads ahead is at two batches, which counts only when later deaths narrow it down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

LOOK_SECONDS = 1.0
"""Time that one look counts at most: what came while the shard was busy was not late."""
Holder = tuple[str, int]
"""A trainer, and the revision of its claim."""
Place = tuple[int, int, int]
"""(pass, chunk, batch)"""
KILLS = 3
"""SIGKILLs in a row at one batch from which on each is a failure of it."""


class IdleSlots:
    """Slots of which nothing comes, in one shard's view of the step that is open.

    The time of a holder counts while the step waits for it, and begins anew with whatever comes of any of its slots.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.heard: set[int] = set()
        """Slots of which a part of a contribution came since the last look."""
        self._at, self._looked = (-1, -1), 0.0
        self._waited: dict[Holder, float] = {}

    def look(
        self, now: float, at: tuple[int, int], missing: Collection[int], holders: Mapping[int, Holder]
    ) -> list[int]:
        """Returns the slots to take away. `at`: the generation and step that are open; `missing`: the slots it lacks.

        Time counts if another trainer has contributed, and waits, or one trainer holds every slot.
        """
        passed, self._looked = min(now - self._looked, LOOK_SECONDS), now
        alive = {holders[slot][0] for slot in self.heard if slot in holders}
        self.heard.clear()
        if at != self._at:
            self._at, self._waited = at, {}
        late = {holders[slot] for slot in missing if slot in holders and holders[slot][0] not in alive}
        lacking = {holders[slot][0] for slot in missing if slot in holders}
        names = {trainer for trainer, _ in holders.values()}
        if not names - lacking and len(names) > 1:
            late = set()
        self._waited = {holder: self._waited.get(holder, -passed) + passed for holder in late}
        return sorted(s for s in missing if s in holders and self._waited.get(holders[s], 0.0) > self.timeout)


class Deaths:
    """The deaths of a job's processes, in their order."""

    def __init__(self) -> None:
        self._suspects: frozenset[Place] = frozenset()
        self._in_a_row = 0

    def blames(self, how: Literal["asked", "killed", "crashed"], at: frozenset[Place]) -> bool:
        """Returns True if the death is a failure of the batch that its process was at.

        `how`: it was asked to end, by SIGKILL, or in a way that no scheduler causes. `at`: the batches at which user
        code ran; empty for a pserver, and for a process that waited.
        """
        if how == "asked" or not at:
            self._suspects, self._in_a_row = frozenset(), 0
            return False
        common = self._suspects & at
        self._in_a_row = self._in_a_row + 1 if common else 1
        self._suspects = common or at
        return len(at) == 1 and (how == "crashed" or self._in_a_row >= KILLS)
