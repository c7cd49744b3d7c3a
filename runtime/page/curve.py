"""A job's loss and metrics over its steps, as a curve of a few hundred points, however long it trains.

What trainers note of each batch (`process/metric_files.py`) is read on from where it was read to, at most so much at a
time. Rows are summed up in buckets of steps, each twice as wide when there are too many of them: so neither memory nor
the time of a look grows with the job. A batch that was computed twice counts twice in the mean of its bucket.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphft.runtime.process.means import SHRINK, grow
from graphft.runtime.process.metric_files import LEVELS, check_listed, files_of, read_file

BUCKETS = 512
PIECE = 256 << 10
LOOK_BYTES = 2 << 20
"""Read at a time: of a job whose files are larger, the curve grows from look to look."""
METRICS = 12
"""So many metrics have a curve, beside the loss."""


@dataclass(slots=True)
class _Bucket:
    """Of some steps. `at`: when the first batch of them was computed (Unix seconds)."""

    at: float = math.inf
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By series: sum weighted by samples, times SHRINK; samples."""

    def add(self, name: str, total: float, samples: int) -> None:
        before = self.sums.get(name, (0.0, 0))
        self.sums[name] = before[0] + total, before[1] + samples

    def take(self, other: _Bucket) -> None:
        self.at = min(self.at, other.at)
        for name, (total, samples) in other.sums.items():
            self.add(name, total, samples)


class Curve:
    """Steps are counted from 0; a bucket is of `width` steps."""

    def __init__(self) -> None:
        self.width = 1
        self.nonfinite = 0
        """Values that were no numbers: they are in no mean."""
        self._buckets: dict[int, _Bucket] = {}

    def add(self, step: int, samples: int, values: dict[str, float], at: float) -> None:
        """A batch: means over its samples."""
        bucket = self._buckets.setdefault(step // self.width, _Bucket())
        bucket.at = min(bucket.at, at)
        for name, value in values.items():
            if not math.isfinite(value):
                self.nonfinite += 1
            elif name in bucket.sums or len(bucket.sums) <= METRICS:
                bucket.add(name, value * SHRINK * samples, samples)
        while len(self._buckets) > BUCKETS:
            self._widen()

    def _widen(self) -> None:
        self.width *= 2
        narrow, self._buckets = self._buckets, {}
        for index, bucket in narrow.items():
            self._buckets.setdefault(index // 2, _Bucket()).take(bucket)

    def step_at(self, at: float) -> int | None:
        """The step that the job was at, at this time; None before the first batch that is known."""
        ordered = sorted(self._buckets.items())
        times: list[float] = []
        for _, bucket in ordered:  # of steps that were first computed after a rollback went behind them
            times.append(max(bucket.at, times[-1] if times else bucket.at))
        place = bisect.bisect_right(times, at)
        return ordered[place - 1][0] * self.width if place else None

    def to_json(self) -> dict[str, Any]:
        """`steps`, and by name as many values: None where a bucket has none."""
        ordered = sorted(self._buckets.items())
        names = dict.fromkeys(name for _, bucket in ordered for name in bucket.sums)
        return {
            "steps": [index * self.width for index, _ in ordered],
            "series": {name: [_mean(bucket, name) for _, bucket in ordered] for name in names},
            "width": self.width,
            "nonfinite": self.nonfinite,
        }


def _mean(bucket: _Bucket, name: str) -> float | None:
    total, samples = bucket.sums.get(name, (0.0, 0))
    return float(f"{grow(total / samples):.6g}") if samples else None


class MetricFiles:
    """The files of a job's folder, read on from look to look. `behind`: bytes that are not read so far; `unread`: which
    files cannot be read, and why.

    Where the oldest files with each step were deleted, those with each 16th or 256th one tell of old steps.
    """

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._offsets: dict[str, int] = {}
        self.behind = 0
        self.unread: list[str] = []

    def read(self, curve: Curve) -> None:
        """Raises nothing: a file that has gone, or cannot be read, is left out."""
        budget, self.behind, self.unread = LOOK_BYTES, 0, []
        check_listed(self._job_dir, self.unread.append)
        for level in LEVELS:
            for path in files_of(self._job_dir, level):
                with contextlib.suppress(OSError):
                    budget -= self._read(path, curve, budget, thinned=level > 1)

    def _read(self, path: Path, curve: Curve, budget: int, thinned: bool) -> int:
        """Returns how many bytes were read. `thinned`: its rows may be in other files, too."""
        first = offset = self._offsets.get(path.name, 0)
        found, piece = path.stat(), min(budget, PIECE)
        size, stopped = found.st_size, piece <= 0
        new = size > first or not stat.S_ISREG(found.st_mode)  # which is told
        for table, end in read_file(path, first, piece, self.unread.append) if new and not stopped else ():
            offset = end
            for row in table.rows():
                if not thinned or all(map(math.isfinite, row.values.values())):  # which is told once
                    curve.add(max(0, row.step), max(1, row.samples), row.values, row.at)
            if stopped := offset - first + piece > budget:
                break
        self._offsets[path.name] = offset
        self.behind += max(0, size - offset) * stopped
        return offset - first
