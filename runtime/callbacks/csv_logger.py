"""`graphft.callbacks.CSVLogger`: steps, epochs and validations as CSV files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from graphft.errors import UsageError
from graphft.fileio import read_regular, write_atomically
from graphft.runtime.callbacks.callbacks import Run
from graphft.runtime.callbacks.csv_table import CsvTable
from graphft.sealed_json import parse_json

OWN = "csv-logger.json"
"""In the run's folder: the files elsewhere that have its rows."""


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
