"""Rows as JSON lines, `.jsonl` in `metrics/`: as graphft wrote them before there was `metric_rows`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from graphft.fileio import open_regular
from graphft.runtime.process.metric_table import Table

SUFFIX = ".jsonl"
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Row(msgspec.Struct):
    """A line."""

    step: Count
    slot: Count
    loss: float
    samples: Count = 0
    at: float = 0.0
    metrics: dict[str, float] = {}


_DECODER = msgspec.json.Decoder(Row)


def read_lines(path: Path, offset: int, piece: int) -> Iterator[tuple[Table, int]]:
    """The whole lines from this byte on, piece by piece, each with where the next piece begins. Lines that are damaged
    are left out. `piece`: bytes to read at a time. Raises OSError."""
    with open_regular(path) as file:
        file.seek(offset)
        rest = b""
        while block := file.read(piece):
            whole, end, new = (rest + block).rpartition(b"\n")
            rest = new if end else rest + block
            if end:
                offset += len(whole) + 1
                yield _table(_rows(whole)), offset


def copy_lines(path: Path, target: Path, before: int) -> None:
    """The lines of the steps before this one, as another file. Raises OSError."""
    with open_regular(path) as file:
        kept = [line for line in file if (row := _row(line)) is not None and row.step < before]
    if kept:
        target.write_bytes(b"".join(kept))


def _rows(lines: bytes) -> list[Row]:
    try:
        return _DECODER.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeDecodeError):  # one of them: cut off, damaged, or NaN
        return [row for line in lines.split(b"\n") if (row := _row(line)) is not None]


def _row(line: bytes) -> Row | None:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:  # Python's JSON has numbers that are not finite
        return msgspec.convert(json.loads(line), Row)
    except (msgspec.ValidationError, ValueError, RecursionError):  # what is left of a row
        return None


def _table(rows: list[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    number, missing = len(rows), float("nan")

    def column(of: Iterable[float], kind: type) -> np.ndarray:
        return np.fromiter(of, kind, number)

    return Table(
        column((r.step for r in rows), np.int64),
        column((r.slot for r in rows), np.int64),
        column((r.samples for r in rows), np.int64),
        column((r.at for r in rows), np.float64),
        {"loss": column((r.loss for r in rows), np.float64)}
        | {n: column((r.metrics.get(n, missing) for r in rows), np.float64) for n in names},
        {"loss": np.ones(number, bool)} | {n: column((n in r.metrics for r in rows), bool) for n in names},
    )
