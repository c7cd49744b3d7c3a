"""A run's steps in their order, each once, from the files in `metrics/`, which are read as they grow.

Rows of a step lie in the files of several trainers, and are written again when the step is computed again. A step is
ready when each slot that has a batch at it has a row. Some rows never come: a full disk did not take them, their
trainer was on a machine with another folder, or was killed; their batch was left out. So a step is given up, and comes
with the rows that are there, when

- the caller knows that it is over;
- sync: a row of a later step was seen `patience` seconds ago (no step begins before the one before it is done);
- so many rows of later steps are there that they would fill the memory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphft.plan import Plan
from graphft.runtime.process.means import mean_of
from graphft.runtime.process.metric_files import files_of, read_file
from graphft.runtime.process.metric_table import Row

PIECE = 1 << 18
"""Bytes that are read at once."""
ROWS_AHEAD = 50_000
PATIENCE_SECONDS = 5.0
BUSY_SECONDS = 1.0
"""For so long what others write meanwhile is read, at one time."""


@dataclass(frozen=True)
class Step:
    """`rows`: in the order of slots. `lacking`: so many slots have a batch at it, and no row."""

    number: int
    rows: tuple[Row, ...]
    lacking: int

    @property
    def means(self) -> dict[str, float]:
        """The loss and each metric by name, weighted by samples, added up in the order of slots; without rows none."""
        found: dict[str, list[tuple[float, int]]] = {}
        for row in self.rows:
            for name, value in row.values.items():
                found.setdefault(name, []).append((value, row.samples))
        return {name: mean_of(values) for name, values in found.items() if any(samples for _, samples in values)}


@dataclass
class _File:
    """`offset`: bytes of it that are read, whole rows. `step`: of the last row there."""

    path: Path
    offset: int = 0
    step: int = -1

    def rows(self) -> Sequence[Row] | None:
        """The next ones; None at its end, or if it is away. A row that is not whole so far is read later."""
        for table, offset in read_file(self.path, self.offset, PIECE):
            self.offset = offset
            return list(table.rows())
        return None


class StepRows:
    """Steps from `begins` on. `patience`: see above; infinite in async mode, where no step waits for another."""

    def __init__(
        self,
        job_dir: Path,
        plan: Plan,
        begins: int,
        patience: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.next = plan, begins
        self._job_dir, self._patience, self._clock = job_dir, patience, clock
        self._ahead = max(100, ROWS_AHEAD // plan.slots)
        self._files: dict[str, _File] = {}
        self._steps: dict[int, dict[int, Row]] = {}
        self._highest = -1
        self._seen = deque([(-math.inf, -1)])
        """When which step was the highest one that a row is of."""

    def steps(self, over: int = 0) -> Iterator[Step]:
        """Those that are ready now. `over`: steps before this one get no rows any more."""
        until = self._clock() + BUSY_SECONDS
        while self.next < over or self._clock() < until:
            read, before = self._read(), self.next
            while self.next < self.plan.total_steps and not self._lacking():
                yield self._pop()
            if read or self.next > before:
                continue
            if self.next >= self.plan.total_steps or not self._is_over(over):
                return
            yield self._pop()

    def _is_over(self, over: int) -> bool:
        """Whether the next step is given up, all that can be read being read."""
        return self.next < over or self.next < self._overdue() or self._is_full()

    def _pop(self) -> Step:
        number, lacking = self.next, self._lacking()
        found = self._steps.pop(number, {})
        self.next += 1
        return Step(number, tuple(found[slot] for slot in sorted(found)), lacking)

    def _lacking(self) -> int:
        """So many slots lack their row of the next step."""
        found = self._steps.get(self.next, {})
        return sum(
            slot not in found and self.plan.locate(self.next, slot) is not None for slot in range(self.plan.slots)
        )

    def _overdue(self) -> int:
        """Steps before this one have no rows that are still to come."""
        until = self._clock() - self._patience
        while len(self._seen) > 1 and self._seen[1][0] <= until:
            self._seen.popleft()
        return self._seen[0][1]

    def _is_full(self) -> bool:
        """Whether a file is not read on, since it is too far ahead."""
        return any(file.step > self.next + self._ahead for file in self._files.values())

    def _read(self) -> bool:
        """Of each file what is new, but not far ahead. Returns whether there was anything."""
        for path in files_of(self._job_dir, 1):
            if path.name not in self._files:
                self._files[path.name] = _File(path)
        before = self._highest
        read = [self._read_file(file) for file in sorted(self._files.values(), key=lambda file: file.step)]
        if self._highest > before:
            self._seen.append((self._clock(), self._highest))
        return any(read)

    def _read_file(self, file: _File) -> bool:
        read = False
        while file.step <= self.next + self._ahead and (rows := file.rows()) is not None:
            read = True
            for row in rows:
                self._take(file, row)
        return read

    def _take(self, file: _File, row: Row) -> None:
        file.step, self._highest = row.step, max(self._highest, row.step)
        if row.step >= self.next:
            slots = self._steps.setdefault(row.step, {})
            before = slots.get(row.slot)
            slots[row.slot] = row if before is None or before.at <= row.at else before
