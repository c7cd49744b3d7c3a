"""What is read of the rows that trainers left, also of killed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphft.runtime.process.metric_files import losses_of, metrics_of


def row(step: int, slot: int, loss: float, samples: int, at: float = 0.0, **metrics: float) -> dict[str, Any]:
    return {"step": step, "slot": slot, "loss": loss, "metrics": metrics, "samples": samples, "at": at}


def write(folder: Path, trainer: str, *rows: dict[str, Any], torn: str = "") -> None:
    (folder / "metrics").mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(r)}\n" for r in rows) + torn
    (folder / "metrics" / f"trainer-{trainer}.jsonl").write_text(text)


def test_a_step_is_the_mean_over_the_samples_of_its_slots(tmp_path: Path) -> None:
    write(tmp_path, "0", row(0, 0, 0.5, 6, accuracy=1.0), row(1, 0, 0.25, 6, accuracy=0.5))
    write(tmp_path, "1", row(0, 1, 1.5, 2, accuracy=0.0))
    assert metrics_of(tmp_path) == {"loss": [(0, 0.75), (1, 0.25)], "accuracy": [(0, 0.75), (1, 0.5)]}


def test_of_a_batch_that_was_computed_twice_the_newest_row_counts(tmp_path: Path) -> None:
    write(tmp_path, "0", row(0, 0, 0.5, 4, at=9.0, accuracy=1.0))
    write(tmp_path, "1", row(0, 0, 2.5, 4, at=3.0, accuracy=0.0))
    assert losses_of(tmp_path) == [(0, 0, 0.5)]
    assert metrics_of(tmp_path)["accuracy"] == [(0, 1.0)]


def test_a_row_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps(row(1, 0, 0.5, 4, accuracy=1.0))
    write(tmp_path, "0", row(0, 0, 0.5, 4, accuracy=1.0), torn=whole[: whole.index("}") + 1])
    assert metrics_of(tmp_path) == {"loss": [(0, 0.5)], "accuracy": [(0, 1.0)]}


def test_a_job_without_metrics_has_its_loss(tmp_path: Path) -> None:
    write(tmp_path, "0", {"step": 0, "slot": 0, "loss": 0.5, "samples": 4})
    assert metrics_of(tmp_path) == {"loss": [(0, 0.5)]}


def test_rows_that_a_disk_has_damaged_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "0", row(0, 0, 0.5, 4))
    with (tmp_path / "metrics" / "trainer-0.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "slot\xff\n7\n[]\n{"step": 1}\n' + json.dumps(row(1, 0, 0.25, 4)).encode() + b"\n")
    assert losses_of(tmp_path) == [(0, 0, 0.5), (1, 0, 0.25)]
