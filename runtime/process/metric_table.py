"""The rows that trainers noted of each batch, as columns: a million of them are read in about a second."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

BLOCK = 4 << 20
"""Bytes of a file that are read at a time."""


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Row(msgspec.Struct):
    """A line of a `.jsonl` file in `metrics/`."""

    step: Count
    slot: Count
    loss: float
    samples: Count = 0
    at: float = 0.0
    metrics: dict[str, float] = {}


@dataclass(frozen=True)
class Table:
    """Columns of equal length. `step`, `slot`, `samples`: int64; `at`: float64, seconds since 1970.

    `values`: by name, `loss` first, float64; `known`: by name, whether the row has that value: bool.
    """

    step: np.ndarray
    slot: np.ndarray
    samples: np.ndarray
    at: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)
    known: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    def take(self, rows: np.ndarray) -> Table:
        """The rows of these indices, or of a mask."""
        columns = (self.step[rows], self.slot[rows], self.samples[rows], self.at[rows])
        values, known = ({name: column[rows] for name, column in of.items()} for of in (self.values, self.known))
        return Table(*columns, values, known)

    def newest(self) -> Table:
        """Of each (step, slot) the row with the newest `at`, of equal ones the last; in order of step and slot."""
        order = np.lexsort((self.at, self.slot, self.step))  # stable
        step, slot = self.step[order], self.slot[order]
        last = np.ones(len(order), bool)
        last[:-1] = (step[1:] != step[:-1]) | (slot[1:] != slot[:-1])
        return self.take(order[last])

    def means(self, name: str, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The groups that have this value, and in each its mean over the samples. `groups`: of each row, in order."""
        rows = self.known[name] & (self.samples > 0)
        groups, samples, values = groups[rows], self.samples[rows], self.values[name][rows]
        if not len(groups):
            return groups, values
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        return groups[starts], np.add.reduceat(values * samples, starts) / np.add.reduceat(samples, starts)


def read_table(job_dir: Path) -> Table:
    """Each (step, slot) of the job in this folder once. What cannot be read of a file is left out."""
    tables = [table for path in sorted((job_dir / "metrics").glob("*.jsonl")) for table in _of_lines(path)]
    return _joined(tables).newest()


def _joined(tables: list[Table]) -> Table:
    names = list(dict.fromkeys(["loss", *(name for table in tables for name in table.values)]))

    def column(of: Iterable[np.ndarray], kind: type) -> np.ndarray:
        return np.concatenate([np.empty(0, kind), *of]).astype(kind, copy=False)

    return Table(
        step=column((t.step for t in tables), np.int64),
        slot=column((t.slot for t in tables), np.int64),
        samples=column((t.samples for t in tables), np.int64),
        at=column((t.at for t in tables), np.float64),
        values={n: column((t.values.get(n, np.full(len(t), np.nan)) for t in tables), np.float64) for n in names},
        known={n: column((t.known.get(n, np.zeros(len(t), bool)) for t in tables), bool) for n in names},
    )


def _of_lines(path: Path) -> Iterator[Table]:
    """A piece of the file at a time: its rows take ten times the memory of its bytes."""
    decoder, rest = msgspec.json.Decoder(Row), b""
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                whole, end, new = (rest + block).rpartition(b"\n")
                rest = new if end else rest + block
                yield _table(_rows(decoder, whole))
        yield _table(_rows(decoder, rest))
    except OSError:
        return


def _rows(decoder: msgspec.json.Decoder[Row], lines: bytes) -> list[Row]:
    try:
        return decoder.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeDecodeError):  # one of them: cut off, damaged, or NaN
        return [row for line in lines.split(b"\n") if (row := _row(decoder, line)) is not None]


def _row(decoder: msgspec.json.Decoder[Row], line: bytes) -> Row | None:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:  # Python's JSON has numbers that are not finite
        return msgspec.convert(json.loads(line), Row)
    except (msgspec.ValidationError, ValueError):  # the last line of a killed trainer, or of a damaged disk
        return None


def _table(rows: list[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    number = len(rows)

    def column(of: Iterable[float], kind: type) -> np.ndarray:
        return np.fromiter(of, kind, number)

    missing = float("nan")
    return Table(
        column((r.step for r in rows), np.int64),
        column((r.slot for r in rows), np.int64),
        column((r.samples for r in rows), np.int64),
        column((r.at for r in rows), np.float64),
        {"loss": column((r.loss for r in rows), np.float64)}
        | {n: column((r.metrics.get(n, missing) for r in rows), np.float64) for n in names},
        {"loss": np.ones(number, bool)} | {n: column((n in r.metrics for r in rows), bool) for n in names},
    )
