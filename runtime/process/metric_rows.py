"""Rows as bytes, `.rows` in `metrics/`: a line of JSON, and rows of one size behind it.

    {"checksum":"...","content":{"at":1785000000.123,"bits":32,"names":["loss","accuracy"],"rows":1,"step":1200}}\\n
    check: u16   slot: u16   step: i32   at: u32   samples: u32   values: a float of `bits` bits for each name

All little-endian. `step` and `at` (milliseconds) count from those of the first line. The exclusive or of a row's words
of 16 bits is CHECK: what a disk has damaged is not taken for a row, nor are the zeros that a crash of the machine
leaves.
Files are only appended to: what follows the last whole row was cut off.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from graphft.fileio import open_regular
from graphft.runtime.process.metric_table import Table
from graphft.sealed_json import seal, unseal

SUFFIX = ".rows"
CHECK = 0x4746
COPIED_ROWS = 1 << 16
"""At a time."""
MOST_HEADER = 1 << 20
"""Bytes: what is longer is no first line."""


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    rows: Literal[1]
    names: tuple[str, ...]
    bits: Literal[32, 64]
    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    at: float


@dataclass(frozen=True)
class RowFormat:
    """What the first line says. `names`: of the values, the loss first; `wide`: values have 64 bits."""

    names: tuple[str, ...]
    wide: bool
    step: int
    at: float

    @property
    def header(self) -> bytes:
        found = _Header(1, self.names, 64 if self.wide else 32, self.step, self.at)
        return seal(msgspec.to_builtins(found))

    @staticmethod
    def parse(line: bytes) -> RowFormat | None:
        """None of a line that is not whole, or damaged."""
        try:
            found = msgspec.convert(unseal(line), _Header)
        except (ValueError, msgspec.ValidationError):
            return None
        return RowFormat(found.names, found.bits == 64, found.step, found.at)

    @cached_property
    def _body(self) -> struct.Struct:
        return struct.Struct(f"<HiII{len(self.names)}{'d' if self.wide else 'f'}")

    @cached_property
    def _words(self) -> struct.Struct:
        return struct.Struct(f"<{self._body.size // 2}H")

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return 2 + self._body.size

    def pack(self, step: int, slot: int, samples: int, at: float, values: Sequence[float]) -> bytes | None:
        """The row; None if it does not fit: another first line is needed."""
        try:
            body = self._body.pack(slot, step - self.step, round((at - self.at) * 1e3), samples, *values)
        except (struct.error, OverflowError):
            return None
        if not self.wide and any(a != b and b == b for a, b in zip(self._body.unpack(body)[4:], values, strict=True)):
            return None  # it would lose bits
        return functools.reduce(operator.xor, self._words.unpack(body), CHECK).to_bytes(2, "little") + body

    @property
    def dtype(self) -> np.dtype:
        values = ("values", "<f8" if self.wide else "<f4", (len(self.names),))
        return np.dtype([("check", "<u2"), ("slot", "<u2"), ("step", "<i4"), ("at", "<u4"), ("samples", "<u4"), values])

    def table(self, data: bytes) -> Table:
        """Whole rows; without those that are damaged."""
        words = np.frombuffer(data, "<u2").reshape(-1, self.size // 2)
        rows = np.frombuffer(data, self.dtype)[np.bitwise_xor.reduce(words, axis=1) == CHECK]
        values = {name: rows["values"][:, i].astype(np.float64) for i, name in enumerate(self.names)}
        return Table(
            rows["step"].astype(np.int64) + self.step,
            rows["slot"].astype(np.int64),
            rows["samples"].astype(np.int64),
            rows["at"] / 1e3 + self.at,
            values,
            {name: np.ones(len(rows), bool) for name in values},
        )


def copy_rows(path: Path, target: Path, before: int) -> None:
    """The rows of the steps before this one, as another file. Raises OSError."""
    with open_regular(path) as file:
        first = file.readline(MOST_HEADER)
        found = RowFormat.parse(first)
        if found is None:
            return
        with target.open("wb") as copy:
            copy.write(first)
            while data := file.read(COPIED_ROWS * found.size):
                rows = np.frombuffer(data[: len(data) // found.size * found.size], found.dtype)
                copy.write(rows[rows["step"].astype(np.int64) + found.step < before].tobytes())


def read_rows(path: Path, offset: int, piece: int) -> Iterator[tuple[Table, int]]:
    """The whole rows from this byte on, piece by piece, each with where the next piece begins. `piece`: bytes to read
    at a time. Raises OSError."""
    with open_regular(path) as file:
        first = file.readline(MOST_HEADER)
        found = RowFormat.parse(first)
        if found is None:
            return
        offset = max(offset, len(first))
        file.seek(offset)
        while data := file.read(max(1, piece // found.size) * found.size):
            data = data[: len(data) // found.size * found.size]
            if not data:
                return
            offset += len(data)
            yield found.table(data), offset
            file.seek(offset)
