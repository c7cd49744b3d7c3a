"""`graphft.callbacks.CSVLogger`: steps, epochs and validations as CSV files."""

from __future__ import annotations

import csv
import io
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.callbacks.callbacks import Logger, Run


class CSVLogger(Logger):
    """Writes a row for each step, once, into a file of the run's folder; epochs and validations into two beside it,
    `steps-epochs.csv` and `steps-validation.csv`. Numbers have all their digits. `name`: of the steps' file."""

    def __init__(self, name: str = "steps.csv") -> None:
        if Path(name).name != name:
            raise UsageError(
                f"CSVLogger was given {name!r}, which is no plain file name",
                rule="callbacks",
                help="the files are in the run's folder: give a name without folders",
            )
        self._name = Path(name)
        self._tables: dict[str, CsvTable] = {}

    def on_begin(self, run: Run) -> None:
        self._folder = run.folder
        by_steps = run.config.get("validate") and run.config["validate"]["every"] != "epoch"
        self._keys = {"train": "step", "epoch": "epoch", "validation": "step" if by_steps else "epoch"}

    def log(self, kind: str, number: int, values: Mapping[str, float]) -> None:
        if kind not in self._tables:
            suffix = {"train": "", "epoch": "-epochs", "validation": "-validation"}[kind]
            path = self._folder / f"{self._name.stem}{suffix}{self._name.suffix}"
            self._tables[kind] = CsvTable(path, self._keys[kind])
        self._tables[kind].write(number, values)

    def flush(self) -> None:
        for table in self._tables.values():
            table.flush()

    def on_end(self) -> None:
        while self._tables:
            self._tables.popitem()[1].close()


class CsvTable:
    """A file to which rows are added over many scripts, whichever of them are killed: each number once, in order. The
    first column, `key`, has the number; the others are those of the first row. Raises OSError; UsageError for a file
    that is no such table."""

    def __init__(self, path: Path, key: str) -> None:
        self.key, self.newest = key, -1
        self._columns: list[str] = []
        self._file = path.open("a+b")
        if not self._file.tell():
            return
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            whole = text.rfind(b"\n") + 1
            header = text[: text.find(b"\n") + 1].decode(errors="replace")
            last = text[text.rfind(b"\n", 0, max(0, whole - 1)) + 1 : whole]
        self._file.truncate(whole)  # a killed script may leave a part of a line
        self._columns = next(csv.reader([header]), [])
        number = last.split(b",")[0].decode(errors="replace")
        if self._columns and (self._columns[0] != key or not (number == key or number.isdecimal())):
            raise UsageError(
                f"{path} is not CSVLogger's: it has no column {key!r} of numbers",
                rule="callbacks",
                help="move it away, or give CSVLogger another name",
            )
        self.newest = int(number) if number.isdecimal() else -1

    def write(self, number: int, values: Mapping[str, float | str]) -> None:
        """Adds a row, unless there is one with this number or a later one."""
        if number <= self.newest:
            return
        if not self._columns:
            self._columns = [self.key, *values]
            self._file.write(_line(self._columns))
        row: Mapping[str, float | str] = {**values, self.key: number}
        self._file.write(_line([row.get(name, "") for name in self._columns]))
        self.newest = number

    def flush(self) -> None:
        """All rows so far are on the disk then."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line(cells: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
