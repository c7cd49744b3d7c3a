"""What `loss_fn` returns beside the loss: what is fetched, what a job records, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.capture.loss_results import reported
from graphft.errors import GraphftError
from graphft.transpiler import Job

INPUTS = {"x": (None, 8), "y": ((None,), torch.int64)}


def build(extras: Callable[[Tensor, Tensor], Any]) -> graphft.Program:
    """A classifier whose loss_fn returns `extras(logits, y)` beside the loss."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        return F.cross_entropy(logits, y), extras(logits, y)

    torch.manual_seed(0)
    return graphft.build(nn.Linear(8, 3), loss_fn, INPUTS)


def transpile(program: graphft.Program) -> Job:
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=torch.zeros(32, 8), y=torch.zeros(32, dtype=torch.int64), chunk_size=16)
    return graphft.transpile(program, chunks=data, batch_size=8)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y).float().mean()


def test_an_executor_fetches_them_by_name() -> None:
    program = build(lambda logits, y: {"accuracy": accuracy(logits, y), "logits": logits})
    x, y = torch.randn(5, 8), torch.randint(3, (5,))
    out = graphft.Executor().run(program, {"x": x, "y": y}, ["loss", "accuracy", "logits"])
    assert torch.equal(F.cross_entropy(out["logits"], y), out["loss"])
    assert torch.equal(accuracy(out["logits"], y), out["accuracy"])


def test_a_trainer_reports_those_that_are_one_float() -> None:
    job = transpile(build(lambda logits, y: {"accuracy": accuracy(logits, y), "again": accuracy(logits, y)}))
    assert reported(job.trainer_program()) == ("loss", "accuracy", "again")


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        (lambda logits, y: logits, r"float32\[batch, 3\]"),
        (lambda logits, y: (logits.argmax(1) == y).sum(), r"int64\[\]"),
        (lambda logits, y: (logits.argmax(1) == y).all(), r"bool\[\]"),
    ],
)
def test_a_job_refuses_what_is_no_mean(extra: Callable[[Tensor, Tensor], Tensor], found: str) -> None:
    program = build(lambda logits, y: {"accuracy": accuracy(logits, y), "hits": extra(logits, y)})
    with pytest.raises(GraphftError, match=rf"returns 'hits' beside the loss as {found}; .* floats of shape \[\]") as e:
        transpile(program)
    assert e.value.rule == "metrics"
    assert "(predicted == y).float().mean()" in str(e.value)


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        (accuracy, "must be a dict of tensors, got "),
        (lambda logits, y: {"lr": 0.1}, "returns 'lr' as a Python number, expected a tensor"),
        (lambda logits, y: {"top 5": accuracy(logits, y)}, "under 'top 5', expected a name of letters, digits"),
        (lambda logits, y: {7: accuracy(logits, y)}, "under 7, expected a name of letters"),
        (lambda logits, y: {"loss": accuracy(logits, y)}, "'loss' is returned .* names something else already"),
        (lambda logits, y: {"y": accuracy(logits, y)}, "'y' is returned .* names something else already"),
        (lambda logits, y: {"weight": accuracy(logits, y)}, "'weight' is returned .* names something else"),
        (lambda logits, y: {"global_step": accuracy(logits, y)}, "'global_step' is returned .* names something"),
    ],
)
def test_refused_at_capture(extras: Callable[[Tensor, Tensor], Any], words: str) -> None:
    with pytest.raises(GraphftError, match=words) as caught:
        build(extras)
    assert caught.value.rule == "loss"
    assert caught.value.help
