"""A loss or metric of each sample with each other one is told at capture, where it can only be an accident."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import graphft

Loss = Callable[[nn.Module, Tensor, Tensor], Any]
INPUTS = {"x": (None, 8), "y": (None,)}


def warnings_of(loss: Loss, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING):
        graphft.build(nn.Linear(8, 1), loss, INPUTS)
    return [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (lambda model, x, y: ((model(x) - y) ** 2).mean(), "sub"),
        (lambda model, x, y: (y - model(x)).abs().mean(), "sub"),
        (lambda model, x, y: ((model(x) - y[:, None]) ** 2).mean() + ((model(x) > 0) == y).float().mean(), "eq"),
    ],
)
def test_told(loss: Loss, op: str, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings_of(loss, caplog)
    assert f"test_batch_pairs.py:{loss.__code__.co_firstlineno} in <lambda>: aten.{op}.Tensor of " in told
    assert "[batch, batch]: each sample with each other one" in told
    assert "squeeze(-1)" in told


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y: ((model(x).squeeze(-1) - y) ** 2).mean(),
        lambda model, x, y: ((model(x) - y.unsqueeze(-1)) ** 2).mean(),
        lambda model, x, y: ((model(x) - y.unsqueeze(0)) ** 2).mean(),  # pairs that are meant
        lambda model, x, y: ((model(x) - model.bias) ** 2).mean(),
        lambda model, x, y: ((model(x) * y).mean(0) - y).square().mean(),
    ],
)
def test_not_told(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_of(loss, caplog)
