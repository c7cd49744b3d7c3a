"""A loss that is a sum over the batch, is told when a job is made of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft

EACH = {"reduction": "none"}
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
Loss = Callable[[Tensor, Tensor, Tensor], Any]


def warnings_of(loss: Loss, caplog: pytest.LogCaptureFixture, y: Tensor, classes: int = 3) -> list[str]:
    """Returns the warnings of `transpile` for a loss_fn that gives loss(output, y, z)."""
    torch.manual_seed(1)
    program = graphft.build(
        nn.Linear(8, classes),
        lambda model, x, y, z: loss(model(x), y, z),
        {"x": (None, 8), "y": ((None,), y.dtype), "z": (None, 3)},
    )
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=torch.randn(8, 8), y=y, z=torch.randn(8, 3), chunk_size=8)
    with caplog.at_level(logging.WARNING):
        graphft.transpile(program, data=data, batch_size=8)
    return [r.getMessage() for r in caplog.records if "batch" in r.getMessage()]


LABELS = torch.tensor([0, 2, 1, 1, 2, 0, 2, 1])


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, z: F.cross_entropy(out, y, reduction="sum"),
        lambda out, y, z: -2 * F.cross_entropy(out, y, **EACH).sum(),
        lambda out, y, z: F.cross_entropy(out, y) + 0.1 * (out - z).square().sum(),
    ],
)
def test_a_sum_is_told(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings_of(loss, caplog, LABELS)
    assert "the loss is a sum over the batch" in told


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, z: F.cross_entropy(out, y),
        lambda out, y, z: F.cross_entropy(out, y, weight=WEIGHTS),
        lambda out, y, z: F.cross_entropy(out, y, reduction="sum") / out.shape[0],
        lambda out, y, z: (F.cross_entropy(out, y, **EACH) * (y > 0)).sum() / (y > 0).sum(),
        lambda out, y, z: F.cross_entropy(out @ z.T, torch.arange(y.shape[0])),  # of a batch, and no sum
    ],
)
def test_a_mean_is_not(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(loss, caplog, LABELS) == []
