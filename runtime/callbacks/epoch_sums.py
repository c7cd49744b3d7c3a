"""What an epoch came to, added up from its rows in the order in which the shards add it up: to the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from graphft.runtime.process.metric_table import Row


@dataclass
class EpochSums:
    """`epoch`: from 1 on. `steps`: of its plan. `names`: of what it has means of, the loss first. `lacking`:
    rows that are not there."""

    epoch: int
    steps: int
    names: tuple[str, ...] = ()
    samples: int = 0
    lacking: int = 0
    first_at: float = math.inf
    last_at: float = -math.inf
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, rows: Iterable[Row], lacking: int, skips: bool) -> None:
        """Those of a step, in the order of slots. `skips`: a step with a loss that is not finite was left out."""
        rows = tuple(rows)
        self.lacking += lacking
        for row in rows:
            self.first_at, self.last_at = min(self.first_at, row.at), max(self.last_at, row.at)
        if skips and not all(math.isfinite(row.values["loss"]) for row in rows):
            return
        for row in rows:
            self.samples += row.samples
            for name, value in row.values.items():
                self.totals[name] = self.totals.get(name, 0.0) + value * row.samples

    @property
    def means(self) -> dict[str, float]:
        """NaN without samples."""
        totals = dict.fromkeys(self.names, math.nan) | self.totals
        return {name: total / self.samples if self.samples else math.nan for name, total in totals.items()}

    @property
    def seconds(self) -> float:
        """From its first row to its last one."""
        return max(0.0, self.last_at - self.first_at)
