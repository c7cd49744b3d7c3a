"""Whether a batch kills the processes that read or compute it, or whether they were preempted.

A segmentation fault is the batch's at once. SIGKILL is what a scheduler sends, and what the kernel sends when memory is
short: it is the batch's only when it comes again and again at the same batch, in whosever hands, while nothing else
dies. A process that was at two batches (it reads ahead) tells only when others narrow it down; the next one in its
place does not read ahead at first (see `Trainer`), so that it is at one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
