"""What a trainer notes of each batch, for people: files of rows in `metrics/` of the job's folder, which stay bounded.

A row goes to the files with each step; that of each 16th and 256th step to other files, too. All trainers of a folder
share a limit: who begins a file deletes the oldest, of each step first, until what is left fits. So no file is ever
written anew, and whatever is killed, a row is there or not. A reader finds the newest steps whole, and older ones
thinned out.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from graphft.errors import ordinal
from graphft.runtime.process.metric_files import FOLDER, LEVELS, file_of, files_of
from graphft.runtime.process.metric_rows import MOST_HEADER, SUFFIX, RowFormat

SHARES = dict(zip(LEVELS, (1 / 2, 1 / 4, 1 / 4), strict=True))
"""Of the limit, what the files of each level may take."""
FILES = 64
"""A file's size is this part of the limit."""
BLOCK = 4096
"""Bytes that a file takes at least."""


def _stat(path: Path) -> os.stat_result | None:
    """None if another trainer has deleted it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _first_step(path: Path) -> int:
    """-1 of a file that is damaged, or that another trainer has deleted."""
    try:
        with path.open("rb") as file:
            found = RowFormat.parse(file.readline(MOST_HEADER))
    except OSError:
        return -1
    return found.step if found is not None else -1


class _Level:
    """This trainer's file with each `level`-th step. Its methods raise OSError."""

    def __init__(self, job_dir: Path, trainer: str, level: int, names: Sequence[str], limit: int) -> None:
        self._job_dir, self._trainer, self._level, self._limit = job_dir, trainer, level, limit
        self._format = RowFormat(tuple(names), False, 0, 0.0)
        self._file: io.FileIO | None = None
        self._number, self._size = -1, 0

    def write(self, step: int, slot: int, samples: int, at: float, values: Sequence[float]) -> list[Path]:
        """Returns files that were deleted for it."""
        deleted: list[Path] = []
        row = self._format.pack(step, slot, samples, at, values) if self._goes_on() else None
        if row is None:
            row = self._begin(step, slot, samples, at, values)
            deleted = self._bound()
        assert self._file is not None
        data = row if self._size else self._format.header + row
        written = self._file.write(data) or 0
        if written != len(data):
            os.ftruncate(self._file.fileno(), self._size)
            raise OSError("the disk is full")
        self._size += written
        return deleted

    def _goes_on(self) -> bool:
        """Whether its file takes another row: it is not large, and no other trainer has deleted it as the oldest."""
        full = self._limit and self._size >= self._limit // FILES
        return self._file is not None and not full and os.fstat(self._file.fileno()).st_nlink > 0

    def _begin(self, step: int, slot: int, samples: int, at: float, values: Sequence[float]) -> bytes:
        """Another file, which this row fits into."""
        for wide in (self._format.wide, True):
            format = RowFormat(self._format.names, wide, step, round(at, 3))
            if (row := format.pack(step, slot, samples, at, values)) is not None:
                break
        else:
            raise OSError(f"slot {slot} with {samples} samples does not fit into a row")
        if len(format.header) > MOST_HEADER:
            raise OSError(f"the names of {len(format.names)} values take more than {MOST_HEADER} bytes")
        self.close()
        self._format, self._number, self._size = format, self._number + 1, 0
        path = file_of(self._job_dir, self._trainer, self._level, self._number)
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("ab", buffering=0)  # a reader finds whole rows meanwhile
        return row

    def _bound(self) -> list[Path]:
        """Deletes the oldest files of this level, of whichever trainer, until the others fit. Of JSON lines none. The
        oldest have the lowest steps: clocks differ, and are set."""
        mine = file_of(self._job_dir, self._trainer, self._level, self._number)
        found = sorted((_first_step(p), s.st_mtime, s.st_size, p) for p in self._others(mine) if (s := _stat(p)))
        most, deleted = self._limit * SHARES[self._level], []
        total = sum(max(size, BLOCK) for *_, size, _ in found)
        for *_, size, path in found if self._limit else ():
            if total <= most:
                break
            path.unlink(missing_ok=True)
            deleted.append(path)
            total -= max(size, BLOCK)
        return deleted

    def _others(self, mine: Path) -> list[Path]:
        return [path for path in files_of(self._job_dir, self._level) if path.suffix == SUFFIX and path != mine]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Metrics:
    """Appends rows. A row that the disk does not take is lost: training goes on.

    `names`: of a row's values, the loss first. `limit`: bytes that the folder's files may take, about; 0: any number.
    `tell_lost` gets the number of rows that are lost, and why, with the 1st, 2nd, 4th, 8th ... of them, and at the end;
    `tell_thinned` what is kept of old steps, when that begins.
    """

    def __init__(
        self,
        job_dir: Path,
        trainer: str,
        names: Sequence[str],
        limit: int,
        tell_lost: Callable[[int, str], object],
        tell_thinned: Callable[[str], object],
    ) -> None:
        self._folder = job_dir / FOLDER
        self._levels = {level: _Level(job_dir, trainer, level, names, limit) for level in LEVELS}
        self._limit, self._tell_lost, self._tell_thinned = limit, tell_lost, tell_thinned
        self.lost, self._told, self._why = 0, 0, ""
        self._thinned: set[int] = set()

    def write(self, step: int, slot: int, samples: int, at: float, values: Sequence[float]) -> None:
        """`at`: seconds since 1970."""
        try:
            for level, file in self._levels.items():
                if step % level == 0 and file.write(step, slot, samples, at, values) and level not in self._thinned:
                    self._thinned.add(level)
                    self._say_thinned(level)
        except OSError as error:
            self.lost += 1
            self._why = str(error)
            if self.lost & (self.lost - 1) == 0:
                self._say()

    def _say_thinned(self, level: int) -> None:
        kept = [ordinal(other) for other in LEVELS if other > level]
        what = f"of the oldest steps only each {kept[0]} is kept" if kept else "the oldest steps are deleted"
        self._tell_thinned(f"{self._folder} takes its {self._limit / 1e6:,.0f} MB (metrics_limit): {what}")

    def _say(self) -> None:
        if self.lost > self._told:
            self._told = self.lost
            what = f"a row of {self._folder} is lost, the {ordinal(self.lost)} so far: {self._why}"
            self._tell_lost(self.lost, what)

    def close(self) -> None:
        self._say()
        for file in self._levels.values():
            file.close()
