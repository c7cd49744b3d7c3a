"""What is read of the rows that trainers left, also of killed ones."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.runtime.callbacks.step_rows import Step as StepRows
from graphft.runtime.page.curve import Curve
from graphft.runtime.process.means import mean_of, means_of
from graphft.runtime.process.metric_files import losses_of, metrics_of
from graphft.runtime.process.metric_table import Row


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


def test_means_of_finite_values_are_finite(tmp_path: Path) -> None:
    """Their sums overflow: they were told as infinite."""
    largest = sys.float_info.max
    write(tmp_path, "0", row(0, 0, largest, 6, f=1.5e308), row(1, 0, 0.1, 3), row(2, 0, math.inf, 3, f=math.nan))
    write(tmp_path, "1", row(0, 1, largest, 5, f=-1e308), row(1, 1, 0.7, 4), row(2, 1, -1.7e308, 2))
    found = metrics_of(tmp_path)
    assert found["loss"] == [(0, largest), (1, (0.1 * 3 + 0.7 * 4) / 7), (2, math.inf)]
    assert found["f"][0] == (0, pytest.approx((0.9e308 - 0.5e308) / 11 * 10))
    assert math.isnan(found["f"][1][1])
    step = StepRows(2, tuple(Row(0, n, 3, 0.0, {"loss": largest}) for n in range(3)), 0)
    assert step.means == {"loss": pytest.approx(largest)}
    curve = Curve()
    for n in range(4):
        curve.add(0, 5, {"loss": (-1) ** n * 1.5e308}, 0.0)
        curve.add(1, 7, {"loss": 1.5e308}, 0.0)
    assert curve.to_json()["series"]["loss"] == [0.0, 1.5e308]
    assert mean_of([(1.7e308, 1), (1.5e308, 1)]) == pytest.approx(1.6e308)
    assert mean_of([(math.inf, 1), (1.0, 1)]) == math.inf
    assert math.isnan(mean_of([(math.inf, 1), (-math.inf, 1)]))


@given(st.lists(st.tuples(st.floats(-1e30, 1e30), st.integers(1, 1 << 20)), min_size=1, max_size=9))
def test_of_all_others_means_have_the_bits_of_a_plain_sum(found: list[tuple[float, int]]) -> None:
    values, samples = map(np.array, zip(*found, strict=True))
    mean = sum(value * count for value, count in found) / sum(count for _, count in found)
    assert mean_of(found) == mean
    assert mean_of([*found, (1.7e308, 1), (1.7e308, 1)]) < math.inf
    plain = np.add.reduceat(values * samples, [0]) / np.add.reduceat(samples, [0])
    assert means_of(values, samples, np.array([0])).tolist() == plain.tolist()


def test_of_a_batch_that_was_computed_twice_the_newest_row_counts(tmp_path: Path) -> None:
    write(tmp_path, "0", row(0, 0, 0.5, 4, at=9.0, accuracy=1.0))
    write(tmp_path, "1", row(0, 0, 2.5, 4, at=3.0, accuracy=0.0))
    assert losses_of(tmp_path) == [(0, 0, 0.5)]
    assert metrics_of(tmp_path)["accuracy"] == [(0, 1.0)]


def test_a_row_that_is_cut_off_is_discarded(tmp_path: Path) -> None:
    whole = json.dumps(row(1, 0, 0.5, 4, accuracy=1.0))
    write(tmp_path, "0", row(0, 0, 0.5, 4, accuracy=1.0), torn=whole[: whole.index("}") + 1])
    assert metrics_of(tmp_path) == {"loss": [(0, 0.5)], "accuracy": [(0, 1.0)]}


def test_a_job_without_metrics_has_its_loss(tmp_path: Path) -> None:
    write(tmp_path, "0", {"step": 0, "slot": 0, "loss": 0.5, "samples": 4})
    assert metrics_of(tmp_path) == {"loss": [(0, 0.5)]}


def test_rows_that_a_disk_has_damaged_are_discarded(tmp_path: Path) -> None:
    write(tmp_path, "0", row(0, 0, 0.5, 4))
    with (tmp_path / "metrics" / "trainer-0.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "slot\xff\n7\n[]\n{"step": 1}\n' + json.dumps(row(1, 0, 0.25, 4)).encode() + b"\n")
    assert losses_of(tmp_path) == [(0, 0, 0.5), (1, 0, 0.25)]
