"""`graphft.callbacks.CSVLogger`: steps, epochs and validations as CSV files."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from graphft.disk.fileio import make_folder, read_regular, write_atomically
from graphft.disk.sealed_json import parse_json
from graphft.errors import UsageError
from graphft.runtime.callbacks.callbacks import Run

OWN = "csv-logger.json"
"""In the run's folder: the files elsewhere that have its rows."""
BLOCK = 1 << 16


class CSVLogger:
    """A row for each step, once, whatever is killed; beside it, `<name>-epochs.csv` and `<name>-validation.csv`.

    Numbers have all their digits. `path`: of the steps' file; "": `steps.csv` in the run's folder. A file that has the
    rows of something else, another run say, is a UsageError.
    """

    def __init__(self, path: str | os.PathLike[str] = "") -> None:
        self._path = Path(path) if path != "" else None
        self._tables: dict[str, CsvTable] = {}

    def on_begin(self, run: Run) -> None:
        path = self._path if self._path is not None else run.folder / "steps.csv"
        beside = {kind: path.with_name(f"{path.stem}-{kind}{path.suffix}") for kind in ("epochs", "validation")}
        self._files = {"steps": path, **beside}
        by_steps = run.config.get("validate") and run.config["validate"]["every"] != "epoch"
        self._keys = {"steps": "step", "epochs": "epoch", "validation": "step" if by_steps else "epoch"}
        if self._path is not None:
            _own(run, list(self._files.values()))

    def held(self) -> tuple[int, int]:
        return self._table("steps").newest + 1, max(0, self._table("epochs").newest)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._table("steps").write(step, metrics)

    def on_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._table("epochs").write(epoch, {name: value for name, value in metrics.items() if name != "epoch"})

    def on_validation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._table("validation").write(epoch, metrics)

    def flush(self) -> None:
        for table in self._tables.values():
            try:
                table.flush()
            except ValueError as error:  # what is in its place now is no such table
                raise _foreign(table.path, str(error)) from None

    def on_end(self) -> None:
        while self._tables:
            _, table = self._tables.popitem()
            table.close()

    def _table(self, kind: str) -> CsvTable:
        if kind not in self._tables:
            path = self._files[kind]
            try:
                self._tables[kind] = CsvTable(path, self._keys[kind])
            except ValueError as error:
                raise _foreign(path, str(error)) from None
        return self._tables[kind]


def _own(run: Run, paths: list[Path]) -> None:
    """Notes that these files are the run's. Raises UsageError for one that has rows, and was not before."""
    found, names = run.folder / OWN, [str(path.resolve()) for path in paths]
    known: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        known = parse_json(read_regular(found))
    for path, name in zip(paths, names, strict=True):
        if path.is_dir():
            raise _foreign(path, "it is a folder")
        if name not in known and path.exists() and path.stat().st_size:
            raise _foreign(path, f"it has rows, which are not of the run in {run.folder}")
    if not {*names} <= {*known}:
        write_atomically(found, json.dumps(sorted({*known, *names})).encode())


def _foreign(path: Path, why: str) -> UsageError:
    return UsageError(
        f"CSVLogger cannot write to {path}: {why}",
        rule="callbacks",
        help="give another path, or none: CSVLogger() writes into the run's folder",
    )


class CsvTable:
    """A file to which rows are added over many scripts, whichever of them are killed: each number once, in order. The
    first column, `key`, has the number; the others are those of the first row.

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
        if not self._columns:
            self._columns = [self.key, *values]
            self._file.write(_line(self._columns))
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


def _line(cells: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
