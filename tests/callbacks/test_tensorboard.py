"""What TensorBoard's own reader finds: each step once, however the scripts that wrote it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphft.callbacks import TensorBoard
from graphft.runtime.coordination.records import Event
from tests.callbacks.test_csv_logger import run

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed (extra tensorboard)"
)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: Any = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def log(board: TensorBoard, folder: Path, steps: range) -> TensorBoard:
    board.on_begin(run(folder))
    for step in steps:
        board.on_step(step, {"loss": 0.5**step, "accuracy": step / 4})
    board.flush()
    return board


def test_each_step_is_there_once_after_a_torn_file(tmp_path: Path) -> None:
    log(TensorBoard(tmp_path / "runs"), tmp_path / "job", range(5)).on_end()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "job-01234567"
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-7])  # as of a script that was killed
    board = TensorBoard(tmp_path / "runs")
    board.on_begin(run(tmp_path / "job"))
    assert board.held() == (4, 0)
    log(board, tmp_path / "job", range(2, 8))
    board.on_epoch(1, {"epoch": 1, "loss": 0.25})
    board.on_validation(1, {"loss": 0.75})
    board.on_event(Event(1.0, "launcher", "died", "trainer 1 died"))
    board.on_end()
    board = TensorBoard(tmp_path / "runs")
    board.on_begin(run(tmp_path / "job"))
    assert board.held() == (8, 1)
    board.on_epoch(1, {"epoch": 1, "loss": 0.25})
    board.on_end()
    found = scalars(folder)
    assert found["train/loss"] == [(step, 0.5**step) for step in range(8)]
    assert found["train/accuracy"] == [(step, step / 4) for step in range(8)]
    assert found["epoch/loss"] == [(1, 0.25)]
    assert found["validation/loss"] == [(1, 0.75)]
    reader: Any = accumulator.EventAccumulator(str(folder))
    reader.Reload()
    (event,) = reader.Tensors("events/text_summary")
    assert event.tensor_proto.string_val == [b"[launcher] trainer 1 died"]
