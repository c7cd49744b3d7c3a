"""Comparing final states bit by bit."""

from __future__ import annotations

import torch

from graphft.runtime.chaos.compare import Chunks, differences


def test_identical_bits() -> None:
    nan = torch.tensor([1.0, float("nan"), -0.0])
    state = {"a": nan, "count": torch.tensor(3), "flag": torch.tensor([True, False]), "none": torch.empty(0),
             "half": torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)}
    assert differences(state, {n: t.clone() for n, t in state.items()}) == []


def test_every_difference_is_named() -> None:
    one = {"zero": torch.tensor([0.0, 1.0]), "gone": torch.ones(1), "shape": torch.ones(2, 1), "type": torch.ones(1),
           "last": torch.tensor([1.0, 2.0, 3.0])}
    other = {"zero": torch.tensor([-0.0, 1.0]), "new": torch.ones(1), "shape": torch.ones(2),
             "type": torch.ones(1, dtype=torch.float64), "last": torch.tensor([1.0, 2.0, 3.0000002])}
    assert differences(one, other) == [
        "gone: only in the reference", "new: only in this run", "last: 1 of 3 elements differ",
        "shape: torch.float32 [2, 1] against torch.float32 [2]",
        "type: torch.float32 [1] against torch.float64 [1]", "zero: 1 of 2 elements differ"]


def test_chunks_are_accounted_for_when_each_has_ended_once() -> None:
    assert Chunks(expected=8, done=7, failed=1, todo=0, pending=0).accounted
    assert not Chunks(expected=8, done=7, failed=0, todo=0, pending=0).accounted
    assert not Chunks(expected=8, done=8, failed=0, todo=0, pending=1).accounted
