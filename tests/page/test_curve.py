"""A curve of a few hundred points, read from a table that grows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from graphft.runtime.page.job_page import BUCKETS, Curve
from graphft.runtime.process.metric_table import FILE
from tests.support.metric_rows import write_rows


def test_the_table_is_read_on_from_where_it_was_read_to(tmp_path: Path) -> None:
    curve = Curve()
    curve.read(tmp_path)
    assert curve.to_json()["series"] == {}
    write_rows(tmp_path, [2.0], accuracy=0.5)
    curve.read(tmp_path)
    assert curve.to_json()["series"] == {"loss": [2.0], "accuracy": [0.5]}
    write_rows(tmp_path, [1.5, 1.0], 1, accuracy=0.75)
    curve.read(tmp_path)
    curve.read(tmp_path)
    told = curve.to_json()
    assert told["steps"] == [0, 1, 2]
    assert told["series"] == {"loss": [2.0, 1.5, 1.0], "accuracy": [0.5, 0.75, 0.75]}


def test_it_stays_small_and_true() -> None:
    """However many steps there are: the mean over all is that of the rows, by their samples."""
    curve, steps = Curve(), np.arange(100_000)
    for part in np.split(steps, 10):
        curve.add(("loss",), part, 1 + part % 3, part[:, None].astype(float), part.astype(float))
    told = curve.to_json()
    assert BUCKETS / 2 < len(told["steps"]) <= BUCKETS
    assert told["width"] == 256
    assert told["series"]["loss"][0] == pytest.approx(255 / 2, rel=0.01)
    assert told["steps"][-1] == 100_000 // 256 * 256


def test_values_that_are_not_finite_and_files_that_are_no_table(tmp_path: Path) -> None:
    write_rows(tmp_path, [math.nan, math.inf, 4.0])
    curve = Curve()
    curve.read(tmp_path)
    assert curve.to_json()["series"] == {"loss": [None, None, 4.0]}
    (tmp_path / FILE).write_text("[]")
    curve.read(tmp_path)
    assert "cannot be read" in curve.unread


def test_the_step_at_a_time() -> None:
    curve, steps = Curve(), np.arange(10)
    curve.add(("loss",), steps, np.ones(10), np.ones((10, 1)), 100.0 + steps)
    assert curve.step_at(99.0) is None
    assert curve.step_at(104.5) == 4
    assert curve.step_at(1e9) == 9
