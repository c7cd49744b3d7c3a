"""Judges whether deaths of processes are failures of their batches.

A segmentation fault is the batch's fault at once. SIGKILL comes from schedulers, and from the kernel when memory is
short: it is the batch's fault only if it comes again and again at the same batch, while nothing else dies. A process
that reads ahead is at two batches, which counts only when later deaths narrow it down.
"""

from __future__ import annotations

from typing import Literal

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
