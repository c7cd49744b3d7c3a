"""Schedules of faults are a function of the seed, with every kind in it; results are compared bit by bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from graphft.errors import GraphftError
from graphft.runtime.chaos.experiment import differences, metric_differences
from graphft.runtime.chaos.faults import COORDINATOR_WEIGHTS, WEIGHTS, kinds_of, make_schedule
from tests.support.metric_rows import write_rows

KINDS = tuple(WEIGHTS)


def test_schedules() -> None:
    assert make_schedule(7, 40, KINDS, 1000, 10) == make_schedule(7, 40, KINDS, 1000, 10)
    assert make_schedule(7, 40, KINDS, 1000, 10) != make_schedule(8, 40, KINDS, 1000, 10)
    for seed in range(20):
        assert sorted(f.kind for f in make_schedule(seed, len(KINDS), KINDS, 1000, 10)) == sorted(KINDS)
        assert len({f.kind for f in make_schedule(seed, 3, KINDS, 1000, 10)}) == 3
        faults = make_schedule(seed, 50, KINDS, 1000, 10)
        assert [f.step for f in faults] == sorted(f.step for f in faults)
        assert all(20 <= f.step <= 950 and f.pick([4, 5, 6]) in (4, 5, 6) for f in faults)
        assert faults[0].after is None, "there is nothing yet to recover from"
        assert {f.after is None for f in faults} == {True, False}
        assert all(f.seconds < 0.8 * 10 for f in faults if f.kind.startswith("pause-")), "before the lease ends"
        assert all(f.seconds > 10 for f in faults if f.kind.startswith("freeze-"))


def test_kinds() -> None:
    assert set(kinds_of(())) == {*WEIGHTS}
    assert set(kinds_of((), coordinator=True)) == {*WEIGHTS, *COORDINATOR_WEIGHTS}
    assert kinds_of(("kill-etcd", "kill-job")) == ("kill-etcd", "kill-job")
    for impossible in ("flood", "kill-coordinator"):
        with pytest.raises(GraphftError, match=r"^error\[chaos-kind\]"):
            kinds_of((impossible,))


def test_every_difference_is_named() -> None:
    one = {
        "nan": torch.tensor([1.0, math.nan, -0.0]),
        "half": torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16),
        "zero": torch.tensor([0.0, 1.0]),
        "gone": torch.ones(1),
        "shape": torch.ones(2, 1),
        "type": torch.ones(1),
    }
    assert differences(one, {n: t.clone() for n, t in one.items()}) == []
    same = {name: one[name].clone() for name in ("nan", "half")}
    other = {"zero": torch.tensor([-0.0, 1.0]), "shape": torch.ones(2), "type": torch.ones(1, dtype=torch.float64)}
    assert differences(one, same | other) == [
        "gone: only in the reference",
        "shape: torch.float32 [2, 1] against torch.float32 [2]",
        "type: torch.float32 [1] against torch.float64 [1]",
        "zero: 1 of 2 elements differ",
    ]


def test_metrics_are_compared_step_by_step(tmp_path: Path) -> None:
    for name, losses in {"a": [0.1, 0.2, math.nan], "b": [0.1, 0.2, math.nan], "c": [0.1, 0.1 + 0.2]}.items():
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, losses)
    assert metric_differences(tmp_path / "a", tmp_path / "b") == []
    assert metric_differences(tmp_path / "a", tmp_path / "c") == [
        "its table of metrics has 2 steps, the reference's 3",
        "metrics of step 1: differ",
    ]
