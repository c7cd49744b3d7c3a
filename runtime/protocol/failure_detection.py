"""Slots whose holders contribute nothing: what a shard takes away so that the job can go on.

It is the net below leases and below what a trainer knows of itself. A trainer may live, mark progress and believe that
it reaches every shard, and still nothing comes of its slots; the others wait for it at every step.

    idle = IdleSlots(timeout=60.0)
    idle.heard(slot)                                   # a part of a contribution came
    for slot in idle.look(now, step, missing, holders): ...    # take it from its holder

`holders`: slot -> (trainer, revision of the claim). The time counts from the moment on at which the shard sees the step
wait for this holder, and begins anew with whatever comes from it, for any of its slots.


Whether a batch kills the processes that read or compute it, or whether they were preempted.

A segmentation fault is the batch's at once. SIGKILL is what a scheduler sends, and what the kernel sends when memory is
short: it is the batch's only when it comes again and again at the same batch, in whosever hands, while nothing else
dies. A process that was at two batches (it reads ahead) tells only when others narrow it down; the next one in its
place does not read ahead at first (see `Trainer`), so that it is at one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

LOOK_SECONDS = 1.0
"""One look counts so much at most: what came while the shard itself was busy was not late."""
Holder = tuple[str, int]


class IdleSlots:
    """One shard's view of the step that is open."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._step = (-1, -1)
        self._heard: set[int] = set()
        self._waited: dict[Holder, float] = {}
        self._looked: float | None = None

    def heard(self, slot: int) -> None:
        """A part of a contribution came, for whichever step."""
        self._heard.add(slot)

    def look(
        self, now: float, step: tuple[int, int], missing: Collection[int], holders: Mapping[int, Holder]
    ) -> list[int]:
        """The slots to take away now. `step`: generation and step that are open; `missing`: what they lack."""
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
        """A trainer has contributed and waits; or one trainer holds every slot, and there is no other to see it."""
        late = {holders[slot][0] for slot in missing if slot in holders}
        given = {trainer for slot, (trainer, _) in holders.items() if slot not in missing}
        return bool(given - late) or len({trainer for trainer, _ in holders.values()}) == 1


KILLS = 3
"""So many SIGKILLs in a row at one batch count as a failure of it, and so does each one after them."""


@dataclass(frozen=True, slots=True)
class Died:
    """A process has ended without a word. `how`: it was asked to, SIGKILL, or what no scheduler sends. `at`:
    where user code ran in it, (pass, chunk, batch) each; empty for a pserver, and for a process that waited for others.
    """

    how: Literal["asked", "killed", "crashed"]
    at: frozenset[tuple[int, int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`fatal`: this death is a failure of the batch that the process was at. `in_a_row`: deaths there so far."""

    fatal: bool
    in_a_row: int
    reason: str


class Deaths:
    """The deaths of a job's processes, in their order."""

    def __init__(self) -> None:
        self._suspects: frozenset[tuple[int, int, int]] = frozenset()
        self._in_a_row = 0

    def step(self, died: Died) -> Verdict:
        if died.how == "asked" or not died.at:
            self._suspects, self._in_a_row = frozenset(), 0
            return Verdict(False, 0, "no user code was running" if not died.at else "it was asked to end")
        common = self._suspects & died.at
        self._in_a_row = self._in_a_row + 1 if common else 1
        self._suspects = common or died.at
        if len(died.at) > 1:
            return Verdict(False, self._in_a_row, "it was at two batches")
        if died.how == "killed" and self._in_a_row < KILLS:
            return Verdict(False, self._in_a_row, "it may have been preempted")
        return Verdict(True, self._in_a_row, "nothing but the batch explains it")
