"""A job's loss and metrics over its steps, as a curve of a few hundred points, however long it trains.

The job's table is read on from where it was read to, a part at a time. Rows are summed up in buckets of steps, each
twice as wide when there are too many: so neither memory nor the time of a look grows with the job.
"""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import Any

import numpy as np

from graphft.runtime.process.metric_table import read_rows

BUCKETS = 512
LOOK_ROWS = 1 << 16
"""Read at a time: of a job with more rows, the curve grows from look to look."""
METRICS = 12
"""So many metrics have a curve, beside the loss."""


class Curve:
    """Steps are counted from 0; a bucket is of `width` steps."""

    def __init__(self) -> None:
        self.width = 1
        self.unread = ""
        """Says why the table cannot be read."""
        self._names: tuple[str, ...] = ()
        self._read = 0
        self._last = -1
        self._at = np.full(BUCKETS, np.inf)
        self._samples = self._totals = np.zeros((BUCKETS, 0))

    def read(self, job_dir: Path) -> None:
        """Adds rows that are new in the table of this folder."""
        self.unread = ""
        try:
            rows = read_rows(job_dir, self._read, LOOK_ROWS)
        except (OSError, ValueError) as error:
            self.unread = f"its metrics cannot be read: {error}"
            return
        self._read += len(rows)
        numbers, known = rows.known()
        self.add(known.names, numbers, np.abs(known.data["samples"]), known.data["values"], known.at)

    def add(
        self, names: tuple[str, ...], steps: np.ndarray, samples: np.ndarray, values: np.ndarray, at: np.ndarray
    ) -> None:
        """`steps`: rising; `values`: for each step, and of `names`."""
        if not len(steps):
            return
        if not self._names:
            self._names = names[: 1 + METRICS]
            self._samples, self._totals = np.zeros((2, BUCKETS, len(self._names)))
        self._last = max(self._last, int(steps[-1]))
        while self._last // self.width >= BUCKETS:
            self._widen()
        buckets, values = steps // self.width, values[:, : len(self._names)]
        finite = np.isfinite(values)
        weights = samples[:, None] * finite
        np.minimum.at(self._at, buckets, at)
        np.add.at(self._samples, buckets, weights)
        with np.errstate(over="ignore"):
            np.add.at(self._totals, buckets, np.where(finite, values, 0.0) * weights)

    def _widen(self) -> None:
        self.width *= 2
        self._at = np.r_[self._at.reshape(-1, 2).min(1), np.full(BUCKETS // 2, np.inf)]
        pairs = [table.reshape(-1, 2, table.shape[1]).sum(1) for table in (self._samples, self._totals)]
        self._samples, self._totals = (np.r_[half, np.zeros_like(half)] for half in pairs)

    def step_at(self, at: float) -> int | None:
        """Returns the step that the job was at then; None before the first one that is known."""
        known = np.flatnonzero(np.isfinite(self._at))
        times = np.maximum.accumulate(self._at[known]).tolist()  # of an async job that went back they may fall
        place = bisect.bisect_right(times, at)
        return int(known[place - 1]) * self.width if place else None

    def to_json(self) -> dict[str, Any]:
        """`steps`, and by name as many values: None where a bucket has none."""
        known = np.flatnonzero(np.isfinite(self._at))
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (self._totals / self._samples)[known]
        series = {
            name: [float(f"{mean:.6g}") if mean == mean else None for mean in means[:, i].tolist()]
            for i, name in enumerate(self._names)
        }
        return {
            "steps": (known * self.width).tolist(),
            "series": {name: values for name, values in series.items() if any(v is not None for v in values)},
            "width": self.width,
        }
