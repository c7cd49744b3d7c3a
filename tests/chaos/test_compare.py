"""Comparing final states bit by bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

import graphft
from graphft.runtime.chaos.compare import Chunks, differences, last_loss, metric_differences
from tests.support.programs_by_hand import linear


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


def test_chunks_are_accounted_for_when_each_has_ended_once() -> None:
    assert Chunks(expected=8, done=8, left_out=1, todo=0, pending=0).accounted
    assert not Chunks(expected=8, done=7, left_out=1, todo=0, pending=0).accounted
    assert not Chunks(expected=8, done=8, left_out=0, todo=0, pending=1).accounted


def test_the_loss_of_the_last_pass(tmp_path: Path) -> None:
    """Of each batch once, however often it was computed, and whoever did."""
    data = graphft.arrays(chunk_size=4, x=torch.zeros(8, 8), y=torch.zeros(8, 1))
    job = graphft.transpile(linear(features=8), chunks=data, batch_size=2, trainers=2, sync=False, ft=True, passes=2)
    (tmp_path / "metrics").mkdir()
    for name, rows in {"a": [(0, 9.0), (4, 1.0), (5, 9.0)], "b": [(5, 2.0), (6, 3.0), (7, 6.0)]}.items():
        text = "".join(json.dumps({"step": s, "slot": 0, "loss": loss, "samples": 2}) + "\n" for s, loss in rows)
        (tmp_path / "metrics" / f"trainer-{name}.jsonl").write_text(text)
    assert last_loss(job, tmp_path) == 3.0
    assert math.isnan(last_loss(job, tmp_path / "nowhere"))
