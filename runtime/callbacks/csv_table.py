"""A CSV file to which rows are added over many scripts, whichever of them are killed: each number once, in order."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from graphft.fileio import make_folder, replacing

BLOCK = 1 << 16


class CsvTable:
    """The first column, `key`, has a number that rises. A column that comes later than the first row is empty before.

    Raises OSError; ValueError for a file that is no such table.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self._open()

    def _open(self) -> None:
        make_folder(self.path.parent)
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._mend()
        self._columns = self._header()
        self.newest = self._last_number()
        """-1: there is no row."""

    def write(self, number: int, values: Mapping[str, float | str]) -> None:
        """Adds a row, unless there is one with this number or a later one."""
        if number <= self.newest:
            return
        new = [name for name in (self.key, *values) if name not in self._columns]
        if new:
            self._widen(new)
        row: Mapping[str, float | str] = {**values, self.key: number}
        self._file.write(_line([row.get(name, "") for name in self._columns]))
        self.newest = number

    def flush(self) -> None:
        """All rows so far are on the disk then, in the file of this name."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _mend(self) -> None:
        """Takes away the part of a line that a killed script left, and goes to the end."""
        end = at = self._file.seek(0, os.SEEK_END)
        whole = 0
        while at and not whole:
            begin = max(0, at - BLOCK)
            self._file.seek(begin)
            whole = begin + self._file.read(at - begin).rfind(b"\n") + 1 if at else 0
            whole, at = (whole, begin) if whole > begin else (0, begin)
        if whole < end:
            self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def _header(self) -> list[str]:
        self._file.seek(0)
        line = self._file.readline().decode()
        self._file.seek(0, os.SEEK_END)
        columns = next(csv.reader([line]), [])
        if columns and columns[0] != self.key:
            raise ValueError(f"its first column is {columns[0]!r}, expected {self.key!r}")
        return columns

    def _last_number(self) -> int:
        """Of the last row; a row is shorter than a block."""
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - BLOCK))
        lines = self._file.read().splitlines()
        if len(lines) < 2:
            return -1
        return int(lines[-1].split(b",")[0])

    def _widen(self, new: Sequence[str]) -> None:
        """More columns, in all rows: the file is written anew, whole or not at all."""
        self._file.flush()
        columns, width = [*self._columns, *new], len(self._columns)
        with self.path.open(newline="") as old, replacing(self.path) as file:
            file.write(_line(columns))
            rows = csv.reader(old)
            next(rows, None)
            for row in rows:
                file.write(_line([*row, *[""] * (len(columns) - width)]))
        self._file.close()
        self._file = self.path.open("r+b")
        self._file.seek(0, os.SEEK_END)
        self._columns = columns


def _line(cells: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
