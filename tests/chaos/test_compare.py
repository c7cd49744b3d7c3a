"""Comparing final states bit by bit."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from graphft.runtime.chaos.compare import differences, metric_differences
from tests.support.metric_rows import write_rows


def test_identical_bits() -> None:
    nan = torch.tensor([1.0, float("nan"), -0.0])
    state = {
        "a": nan,
        "count": torch.tensor(3),
        "flag": torch.tensor([True, False]),
        "none": torch.empty(0),
        "half": torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16),
    }
    assert differences(state, {n: t.clone() for n, t in state.items()}) == []


def test_every_difference_is_named() -> None:
    one = {
        "zero": torch.tensor([0.0, 1.0]),
        "gone": torch.ones(1),
        "shape": torch.ones(2, 1),
        "type": torch.ones(1),
        "last": torch.tensor([1.0, 2.0, 3.0]),
    }
    other = {
        "zero": torch.tensor([-0.0, 1.0]),
        "new": torch.ones(1),
        "shape": torch.ones(2),
        "type": torch.ones(1, dtype=torch.float64),
        "last": torch.tensor([1.0, 2.0, 3.0000002]),
    }
    assert differences(one, other) == [
        "gone: only in the reference",
        "new: only in this run",
        "last: 1 of 3 elements differ",
        "shape: torch.float32 [2, 1] against torch.float32 [2]",
        "type: torch.float32 [1] against torch.float64 [1]",
        "zero: 1 of 2 elements differ",
    ]


def test_metrics_are_compared_step_by_step(tmp_path: Path) -> None:
    for name, losses in {"a": [0.1, 0.2, math.nan], "b": [0.1, 0.2, math.nan], "c": [0.1, 0.1 + 0.2]}.items():
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, losses)
    assert metric_differences(tmp_path / "a", tmp_path / "b") == (3, [])
    assert metric_differences(tmp_path / "a", tmp_path / "c") == (
        2,
        ["its table of metrics has 2 steps, the reference's 3", "metrics of step 1: differ"],
    )
