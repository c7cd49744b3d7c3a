"""Comparing final states bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from graphft.runtime.chaos.compare import differences, metric_differences


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


def test_metrics_are_compared_where_both_runs_have_them(tmp_path: Path) -> None:
    rows = {"a": [(0, 0.1), (1, 0.2), (2, 0.3)], "b": [(1, 0.2), (2, 0.3), (3, 0.4)], "c": [(1, 0.2), (2, 0.1 + 0.2)]}
    for name, found in rows.items():
        (tmp_path / name / "metrics").mkdir(parents=True)
        text = "".join(json.dumps({"step": s, "slot": 0, "loss": loss, "samples": 2}) + "\n" for s, loss in found)
        (tmp_path / name / "metrics" / "trainer-0.jsonl").write_text(text)
    assert metric_differences(tmp_path / "a", tmp_path / "b") == (2, [])
    assert metric_differences(tmp_path / "a", tmp_path / "c") == (2, ["loss of step 2, slot 0: differs"])
    (tmp_path / "empty" / "metrics").mkdir(parents=True)
    assert metric_differences(tmp_path / "a", tmp_path / "empty")[1] == ["none of its 3 losses and metrics is there"]
