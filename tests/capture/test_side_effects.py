"""What `loss_fn` does beside computing, and a program would lose: refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import graphft
from graphft.errors import UsageError

INPUTS = {"x": (None, 8), "y": ((None,), torch.int64)}
Effect = Callable[[nn.Module, Tensor], Any]


def build(effect: Effect, after: Callable[[Tensor], Tensor] = lambda loss: loss) -> graphft.Program:
    """A classifier whose loss_fn calls `effect(model, loss)`, too."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        effect(model, loss)
        return after(loss)

    return graphft.build(nn.Linear(8, 3), loss_fn, INPUTS)


@pytest.mark.parametrize(
    ("effect", "called", "remedy"),
    [
        (lambda model, loss: loss.backward(), r"backward\(\)", "leave backward"),
        (lambda model, loss: loss.backward(retain_graph=True), r"backward\(\)", "leave backward"),
        (lambda model, loss: torch.autograd.backward(loss, retain_graph=True), r"backward\(\)", "leave backward"),
        (lambda model, loss: torch.amp.GradScaler("cpu").scale(loss), r"scale\(\)", "autocast"),
    ],
)
def test_refused(effect: Effect, called: str, remedy: str) -> None:
    line = rf"test_side_effects\.py:\d+ in {effect.__name__.replace('<', '.').replace('>', '.')}: "
    with pytest.raises(UsageError, match=line + called) as caught:
        build(effect)
    assert caught.value.rule == "side-effect"
    assert remedy in caught.value.help
    loss = nn.Linear(8, 3)(torch.ones(1, 8)).mean()
    loss.backward()  # torch does again what it did


def test_what_may_stay() -> None:
    def norm_of_gradients(model: nn.Module, loss: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return nn.utils.get_total_norm(grads)

    build(norm_of_gradients)
    build(lambda model, loss: None, lambda loss: loss * torch.rand(()))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    build(lambda model, loss: None, scaler.scale)


def test_another_thread_may_train() -> None:
    trained = []

    def train() -> None:
        model = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(1, 8)).mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        trained.append(model.weight.grad is not None)

    def elsewhere(model: nn.Module, loss: Tensor) -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    build(elsewhere)
    assert trained == [True]


def test_autocast_alone_gives_the_bits_of_eager_torch() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        return F.cross_entropy(logits.float(), y)

    model = nn.Linear(8, 3)
    program = graphft.build(model, loss_fn, INPUTS)
    x, y = torch.randn(5, 8), torch.randint(3, (5,))
    out = graphft.Executor().run(program, {"x": x, "y": y}, ["loss", "weight@GRAD"])
    loss = loss_fn(model, x, y)
    loss.backward()
    assert torch.equal(out["loss"], loss)
    assert torch.equal(out["weight@GRAD"], model.weight.grad)
