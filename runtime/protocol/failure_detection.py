"""Judges, for the driver, trainers of which nothing comes, and deaths of processes.

A trainer may live, mark progress and believe that it reaches every shard, and still nothing comes of its slots, while
the others wait for it: `IdleSlots` is the net below leases and below what a trainer knows of itself.

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


class IdleSlots:
    """One shard's view of the step that is open. The time of a holder counts while the step waits for it, and begins
    anew with whatever comes from it, of any of its slots."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._step = (-1, -1)
        self._heard: set[int] = set()
        self._waited: dict[Holder, float] = {}
        self._looked: float | None = None

    def heard(self, slot: int) -> None:
        """A part of a contribution came, of any step."""
        self._heard.add(slot)

    def look(
        self, now: float, step: tuple[int, int], missing: Collection[int], holders: Mapping[int, Holder]
    ) -> list[int]:
        """Returns the slots to take away. `step`: the generation and step that are open; `missing`: slots they lack."""
        passed = min(now - self._looked, LOOK_SECONDS) if self._looked is not None else 0.0
        self._looked = now
        alive = {holders[slot] for slot in self._heard if slot in holders}
        names = {trainer for trainer, _ in alive}
        self._heard.clear()
        if step != self._step:
            self._step, self._waited = step, {}
        late = {holders[slot] for slot in missing if slot in holders and holders[slot][0] not in names}
        if not self._others_wait(missing, holders):
            late = set()
        self._waited = {holder: self._waited.get(holder, -passed) + passed for holder in late}
        return sorted(slot for slot in missing if self._waited.get(holders.get(slot, ("", 0)), 0.0) > self.timeout)

    def _others_wait(self, missing: Collection[int], holders: Mapping[int, Holder]) -> bool:
        """True if a trainer has contributed and waits, or one trainer holds every slot."""
        late = {holders[slot][0] for slot in missing if slot in holders}
        given = {trainer for slot, (trainer, _) in holders.items() if slot not in missing}
        return bool(given - late) or len({trainer for trainer, _ in holders.values()}) == 1


Place = tuple[int, int, int]
"""(pass, chunk, batch)"""
KILLS = 3
"""SIGKILLs in a row at one batch from which on each is a failure of it."""


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
