"""Operators whose result shapes torch does not know without data: captured, and replayed with eager torch's bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.eager import assert_trains_like_torch


def transcribed(model: nn.Module, x: Tensor, y: Tensor, steps: Tensor, letters: Tensor) -> Tensor:
    return F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), y, steps, letters, zero_infinity=True)


def test_ctc_loss_with_tensors_of_lengths() -> None:
    torch.manual_seed(0)
    inputs = {
        "x": (None, 12, 8),
        "y": ((None, 4), torch.int64),
        "steps": ((None,), torch.int64),
        "letters": ((None,), torch.int64),
    }

    def batch(n: int) -> dict[str, Tensor]:
        lengths = {"steps": torch.randint(8, 13, (n,)), "letters": torch.randint(1, 5, (n,))}
        return {"x": torch.randn(n, 12, 8), "y": torch.randint(1, 5, (n, 4)), **lengths}

    program = assert_trains_like_torch(nn.Linear(8, 5), transcribed, inputs, [batch(12), batch(5)])
    assert program.block("step").program.find_op("aten._ctc_loss.Tensor") is not None


def test_margin_losses() -> None:
    """While torch traces, its multilabel loss counts the labels that pad a target: up to four times as large."""

    def multilabel(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.multilabel_margin_loss(model(x), y)

    def multi(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.multi_margin_loss(model(x), y[:, 0].abs(), p=2, weight=torch.arange(1.0, 7.0))

    torch.manual_seed(0)
    inputs = {"x": (None, 4), "y": ((None, 6), torch.int64)}
    batches = [{"x": torch.randn(n, 4), "y": torch.randint(-1, 6, (n, 6))} for n in (12, 5)]
    for loss_fn in (multilabel, multi):
        assert_trains_like_torch(nn.Linear(4, 6), loss_fn, inputs, batches)
