"""CSV files hold each step once, however the scripts that wrote them ended."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from graphft.callbacks import CSVLogger, Run
from graphft.errors import GraphftError
from graphft.runtime.callbacks.csv_logger import CsvTable


def run(folder: Path, run: str = "0123456789abcdef") -> Run:
    folder.mkdir(exist_ok=True)
    return Run("job", run, folder, {"batch_size": 4})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def log(logger: CSVLogger, folder: Path, steps: range) -> CSVLogger:
    logger.on_begin(run(folder))
    for step in steps:
        logger.on_step(step, {"loss": 1 / (step + 3), "acc, top": math.nan})
    logger.flush()
    return logger


def test_numbers_have_all_their_digits(tmp_path: Path) -> None:
    logger = log(CSVLogger(), tmp_path / "job", range(3))
    logger.on_epoch(1, {"epoch": 1, "loss": 0.1 + 0.2, "samples": 96})
    logger.on_validation(1, {"loss": 0.5})
    logger.flush()
    found = rows(tmp_path / "job" / "steps.csv")
    assert [(int(r["step"]), float(r["loss"])) for r in found] == [(step, 1 / (step + 3)) for step in range(3)]
    assert {r["acc, top"] for r in found} == {"nan"}
    assert rows(tmp_path / "job" / "steps-epochs.csv") == [
        {"epoch": "1", "loss": "0.30000000000000004", "samples": "96"}
    ]
    assert rows(tmp_path / "job" / "steps-validation.csv") == [{"epoch": "1", "loss": "0.5"}]


@pytest.mark.parametrize("cut", range(1, 60, 4))
def test_a_torn_line_is_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "job" / "steps.csv"
    log(CSVLogger(), tmp_path / "job", range(4)).on_end()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    logger = CSVLogger()
    logger.on_begin(run(tmp_path / "job"))
    lines = whole[:-cut].count(b"\n")
    assert logger.held() == (max(0, lines - 1), 0)
    log(logger, tmp_path / "job", range(4))
    assert path.read_bytes() == whole


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    log(CSVLogger(), tmp_path / "job", range(4)).on_end()
    log(CSVLogger(), tmp_path / "job", range(2, 6)).on_end()
    assert [r["step"] for r in rows(tmp_path / "job" / "steps.csv")] == [str(step) for step in range(6)]


def test_a_later_column_has_no_place(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv", "epoch")
    table.write(1, {"loss": 0.5, "f1": 0.75})
    table.write(2, {"loss": 0.25, "f2": 1.0})
    table.flush()
    assert (tmp_path / "t.csv").read_text() == "epoch,loss,f1\n1,0.5,0.75\n2,0.25,\n"
    assert CsvTable(tmp_path / "t.csv", "epoch").newest == 2


def test_another_runs_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    log(CSVLogger(path), tmp_path / "job", range(2)).on_end()
    log(CSVLogger(path), tmp_path / "job", range(3)).on_end()
    before = path.read_bytes()
    with pytest.raises(GraphftError, match=r"all\.csv: it has rows, which are not of the run"):
        log(CSVLogger(path), tmp_path / "job-2", range(5))
    (tmp_path / "notes.csv").write_text("date,what\n1,2\n")
    with pytest.raises(GraphftError, match="which are not of the run"):
        log(CSVLogger(tmp_path / "notes.csv"), tmp_path / "job", range(5))
    assert path.read_bytes() == before
