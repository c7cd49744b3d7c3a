"""Operators whose result shapes torch does not know without data: captured, and replayed with eager torch's bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.ir.verify import verify


def transcribed(model: nn.Module, x: Tensor, y: Tensor, steps: Tensor, letters: Tensor) -> Tensor:
    return F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), y, steps, letters, zero_infinity=True)


def assert_as_eager(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Mapping[str, Any],
    batch: Callable[[int], dict[str, Tensor]],
) -> graphft.Program:
    program, executor = graphft.build(model, loss_fn, inputs), graphft.Executor()
    gradients = [f"{n}@GRAD" for n, _ in model.named_parameters()]
    verify(program, require_values=True)
    for size in (12, 5):
        feed = batch(size)
        model.zero_grad()
        loss = loss_fn(model, **feed)
        loss.backward()
        found = executor.run(program, feed, ["loss", *gradients])
        assert torch.equal(found["loss"], loss)
        assert all(torch.equal(found[f"{n}@GRAD"], p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return program


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

    program = assert_as_eager(nn.Linear(8, 5), transcribed, inputs, batch)
    assert program.block("step").program.find_op("aten._ctc_loss.Tensor") is not None


def test_margin_losses() -> None:
    """While torch traces, its multilabel loss counts the labels that pad a target: up to four times as large."""

    def multilabel(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.multilabel_margin_loss(model(x), y)

    def multi(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.multi_margin_loss(model(x), y[:, 0].abs(), p=2, weight=torch.arange(1.0, 7.0))

    torch.manual_seed(0)
    inputs = {"x": (None, 4), "y": ((None, 6), torch.int64)}
    for loss_fn in (multilabel, multi):
        assert_as_eager(
            nn.Linear(4, 6), loss_fn, inputs, lambda n: {"x": torch.randn(n, 4), "y": torch.randint(-1, 6, (n, 6))}
        )
