"""`metrics.rows` in a run's folder: loss and metrics of each applied step, in order, each once.

Shard 0 writes row n when it makes version n + 1: in sync mode row n is step n, in async mode the n-th batch (unit) that
the shard has applied. So the table belongs to the shard's state: going back to version n cuts it to n rows. A process
that takes the shard over copies these rows into a new file: a predecessor that was only frozen writes into the old one.

    {"names": ["loss", "accuracy"]}\\n
    at: f64   step: i64   samples: i64   values: f64 for each name                     (little-endian)

`at`: seconds since 1970; 0 in a row that no disk has taken. `step`: in the plan (sync: the row's number). `values`:
means over the samples of all slots. `samples`: 0 if no slot had data, negative if the step was discarded as not finite.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphft.disk.fileio import replacing
from graphft.disk.sealed_json import parse_json

FILE = "metrics.rows"
PIECE = 1 << 20


def _dtype(names: Sequence[str]) -> np.dtype:
    return np.dtype([("at", "<f8"), ("step", "<i8"), ("samples", "<i8"), ("values", "<f8", (len(names),))])


def _header(names: Sequence[str]) -> bytes:
    return json.dumps({"names": list(names)}).encode() + b"\n"


@dataclass(frozen=True)
class Rows:
    """Rows `first`, `first` + 1, ... of a table, whose values have these names, the loss first."""

    names: tuple[str, ...]
    first: int
    data: np.ndarray

    def __len__(self) -> int:
        return len(self.data)

    @property
    def at(self) -> np.ndarray:
        return self.data["at"]

    def known(self) -> tuple[np.ndarray, Rows]:
        """Returns the numbers of the rows that are there and whose step had data, and these rows."""
        chosen = np.flatnonzero((self.data["at"] > 0) & (self.data["samples"] != 0))
        return chosen + self.first, Rows(self.names, self.first, self.data[chosen])

    def values(self, name: str) -> np.ndarray:
        column: np.ndarray = self.data["values"][:, self.names.index(name)]
        return column

    def steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields the number of each known row, and its values by name."""
        numbers, rows = self.known()
        for number, values in zip(numbers.tolist(), rows.data["values"].tolist(), strict=True):
            yield number, dict(zip(self.names, values, strict=True))

    def means(self, starts: Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns the samples of each epoch, and by name the means over them: NaN without samples. Added up in the
        order of rows. `starts`: the plan's first step of each epoch, and its number of steps."""
        rows = self.data[(self.data["at"] > 0) & (self.data["samples"] > 0)]
        epochs = np.searchsorted(np.array(starts), rows["step"], side="right") - 1
        count = len(starts) - 1

        def total(weights: np.ndarray) -> np.ndarray:
            return np.bincount(epochs, weights, count)

        samples = total(rows["samples"])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = [total(rows["values"][:, i] * rows["samples"]) / samples for i in range(len(self.names))]
        return samples.astype(np.int64), dict(zip(self.names, found, strict=True))


def read_rows(job_dir: Path, first: int = 0, most: int | None = None) -> Rows:
    """Returns the rows from number `first` on (at most so many) of the table in this folder; none without one. Raises
    OSError, ValueError for a file that is no table."""
    try:
        file = (job_dir / FILE).open("rb")
    except FileNotFoundError:
        return Rows((), first, np.empty(0, _dtype(())))
    with file:
        header = file.readline(PIECE)
        names = _names(header)
        kind = _dtype(names)
        file.seek(len(header) + first * kind.itemsize)
        data = file.read(-1 if most is None else most * kind.itemsize)
    return Rows(names, first, np.frombuffer(data[: len(data) // kind.itemsize * kind.itemsize], kind))


def rows_or_why(job_dir: Path) -> tuple[Rows, str]:
    """Returns all rows of the table in this folder, and why they cannot be read: "" if they can."""
    try:
        return read_rows(job_dir), ""
    except (OSError, ValueError) as error:
        return Rows((), 0, np.empty(0, _dtype(()))), f"{job_dir / FILE} cannot be read: {error}"


def _names(header: bytes) -> tuple[str, ...]:
    try:  # a file that is being made has none
        return tuple(map(str, parse_json(header)["names"])) if header else ()
    except (KeyError, TypeError) as error:
        raise ValueError(f"{FILE} is no table of metrics ({error!r})") from None


class TableWriter:
    """Appends rows. Those that the disk does not take wait in memory: training goes on. `rows`: how many there are
    already; the table in the folder is cut to so many."""

    def __init__(self, job_dir: Path, names: Sequence[str], rows: int) -> None:
        self._job_dir, self._written = job_dir, rows
        self._row, self._header = struct.Struct(f"<dqq{len(names)}d"), _header(names)
        self._pending = bytearray()
        self.waiting = False
        """True while rows wait for the disk, or the table cannot be opened."""
        self._file, self._torn = -1, True
        self.write()

    def append(self, step: int, samples: int, values: Sequence[float]) -> None:
        self._pending += self._row.pack(time.time(), step, samples, *values)
        self.write()

    def cut(self, rows: int) -> None:
        """The rows from this one on are to be written anew."""
        del self._pending[max(0, rows - self._written) * self._row.size :]
        if rows < self._written:
            self._written, self._torn = rows, True
        self.write()

    def sync(self) -> None:
        """Returns when the rows so far are on the disk. May be called by another thread. Raises OSError."""
        if self.waiting or self._file < 0:
            raise OSError(f"{self._job_dir / FILE} takes no rows")
        os.fsync(self._file)

    def write(self) -> None:
        """Writes what waits, as far as the disk takes it."""
        size, done = self._row.size, 0
        try:
            if self._file < 0:
                self._file = self._open()
            if self._torn:  # cut off, or filled up with zeros where rows were lost
                os.ftruncate(self._file, len(self._header) + self._written * size)
                self._torn = False
            if self._pending:
                self._torn = True
                done = os.write(self._file, self._pending)
                self._torn = done % size > 0
        except OSError:
            pass
        self._written += done // size
        del self._pending[: done // size * size]
        self.waiting = bool(self._pending) or self._file < 0

    def _open(self) -> int:
        """Makes the table anew, of the rows that hold. Raises OSError."""
        path, left = self._job_dir / FILE, self._written * self._row.size
        with replacing(path) as new:
            new.write(self._header)
            with contextlib.suppress(FileNotFoundError), path.open("rb") as old:
                left *= old.readline(PIECE) == self._header  # else it is no table of this job
                while left and (piece := old.read(min(left, PIECE))):
                    new.write(piece)
                    left -= len(piece)
        return os.open(path, os.O_WRONLY | os.O_APPEND)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
