"""A loss that is a sum over the batch is told at capture; sums that are divided, or over other dimensions, are not."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft

INPUTS = {"x": (None, 8), "y": ((None,), torch.int64), "z": (None, 3)}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
EACH = {"reduction": "none"}
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def warnings_of(loss: Loss, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What `build` says of a loss_fn that gives loss(logits, y, z)."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return loss(model(x), y, z)

    with caplog.at_level(logging.WARNING):
        graphft.build(nn.Linear(8, 3), loss_fn, INPUTS)
    return [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (lambda out, y, z: F.cross_entropy(out, y, reduction="sum"), "nll_loss_forward"),
        (lambda out, y, z: F.cross_entropy(out, y, reduction="sum", label_smoothing=0.1), ""),
        (lambda out, y, z: F.mse_loss(out, z, reduction="sum"), "mse_loss"),
        (lambda out, y, z: F.binary_cross_entropy_with_logits(out, z, reduction="sum"), "binary_cross_entropy"),
        (lambda out, y, z: F.l1_loss(out, z, reduction="sum"), "sum"),
        (lambda out, y, z: F.cross_entropy(out, y, **EACH).sum(), "sum"),
        (lambda out, y, z: -2 * F.cross_entropy(out, y, **EACH).sum(), "sum"),
        (lambda out, y, z: (out - z).square().sum(1).sum(0), "sum.dim_IntList"),
        (lambda out, y, z: (out - z).square().sum(0).mean(), "sum.dim_IntList"),
        (lambda out, y, z: (out - z).square().mean(1).sum(), "sum"),
        (lambda out, y, z: ((out - z).square() / (1 + z.square())).sum(), "sum"),
        (lambda out, y, z: F.cross_entropy(out, y) + 0.1 * (out - z).square().sum(), "sum"),
        (lambda out, y, z: torch.stack([out.square().sum(), F.cross_entropy(out, y)]).mean(), "sum"),
    ],
)
def test_told(loss: Loss, op: str, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings_of(loss, caplog)
    assert f"the loss is a sum over the batch, by aten.{op}" in told
    assert f"test_batch_sum.py:{loss.__code__.co_firstlineno} in <lambda>: " in told
    assert "reduction='mean'" in told


def test_a_metric_that_is_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def counted(out: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        right = (out.argmax(1) == y).float()
        return F.cross_entropy(out, y), {
            "hits": right.sum(),
            "accuracy": right.mean(),
            "share": right.sum() / y.shape[0],
        }

    (told,) = warnings_of(counted, caplog)  # type: ignore[arg-type]
    assert "metric 'hits' is a sum over the batch, by aten.sum" in told


def test_two_sums_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings_of(lambda out, y, z: out.square().sum() + (out - z).square().sum(), caplog)
    assert "(and 1 more)" in told


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, z: F.cross_entropy(out, y),
        lambda out, y, z: F.cross_entropy(out, y, weight=WEIGHTS),
        lambda out, y, z: F.cross_entropy(out, z.softmax(1)),
        lambda out, y, z: F.kl_div(out.log_softmax(1), z.softmax(1), reduction="batchmean"),
        lambda out, y, z: F.cross_entropy(out, y, reduction="sum") / out.shape[0],
        lambda out, y, z: F.cross_entropy(out, y, reduction="sum") * (1 / out.shape[0]),
        lambda out, y, z: (F.cross_entropy(out, y, **EACH) / out.shape[0]).sum(),
        lambda out, y, z: (F.cross_entropy(out, y, **EACH) * (1 / out.shape[0])).sum(),
        lambda out, y, z: (F.cross_entropy(out, y, **EACH) * (y > 0)).sum() / (y > 0).sum(),
        lambda out, y, z: (F.cross_entropy(out, y, **EACH) * (WEIGHTS[y] / WEIGHTS[y].sum())).sum(),
        lambda out, y, z: (out - z).square().sum(1).mean(),
        lambda out, y, z: (out - z).square().sum(-1).mean(),
        lambda out, y, z: (out - z).square().mean(0).sum(),
        lambda out, y, z: F.cross_entropy(out, y) + 0.1 * WEIGHTS.square().sum(),
    ],
)
def test_not_told(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(loss, caplog) == []
