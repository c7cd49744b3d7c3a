"""What the loss would train in eager torch, but is no parameter of the model: refused by its name, never a constant."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.ir import Kind

HEAD = nn.Linear(4, 2)
SCALE = torch.ones(4, requires_grad=True)


class Listed(nn.Module):
    """Its second layer is in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(8, 4), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.rest[0](self.first(x))


class Attributed(nn.Module):
    """Its scale is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(8, 4), torch.ones(4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale


def by_global(model: nn.Module, x: Tensor) -> Tensor:
    return HEAD(model(x)).square().mean()


def by_helper(model: nn.Module, x: Tensor) -> Tensor:
    return by_global(model, x) + 1


def by_tensor(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * SCALE).mean()


def with_head(head: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    return head(model(x)).square().mean()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def closed_over() -> Callable[..., Tensor]:
    heads = {"main": nn.Linear(4, 2)}
    return lambda model, x: heads["main"](model(x)).square().mean()


def build(loss_fn: Any, model: nn.Module | None = None, **options: Any) -> graphft.Program:
    return graphft.build(model or nn.Linear(8, 4), loss_fn, {"x": (None, 8)}, **options)


@pytest.mark.parametrize(
    ("model", "loss_fn", "name", "code"),
    [
        (None, by_global, r"HEAD\.(weight|bias), float32 .* \(and 1 more\)", by_global),
        (None, by_helper, r"HEAD\.(weight|bias), ", by_global),
        (None, by_tensor, r"SCALE, float32 of shape \(4\), which", by_tensor),
        (None, functools.partial(with_head, nn.Linear(4, 2)), r"loss_fn\[0\]\.(weight|bias), ", with_head),
        (None, closed_over(), r"heads\['main'\]\.(weight|bias), ", None),
        (Listed(), plain, r"model\.rest\[0\]\.(weight|bias), ", Listed.forward),
        (Attributed(), plain, r"model\.scale, ", Attributed.forward),
    ],
    ids=["global", "helper", "tensor", "partial", "closure", "list", "attribute"],
)
def test_named(model: nn.Module | None, loss_fn: Any, name: str, code: Any) -> None:
    with pytest.raises(GraphftError, match=f"the loss depends on {name}") as caught:
        build(loss_fn, model)
    assert caught.value.rule == "outside"
    assert "one module that holds both" in caught.value.help
    if code is not None:
        line = code.__code__.co_firstlineno + 1
        assert f"test_outside.py:{line} in {code.__name__}" in caught.value.message


def test_parameters_of_the_loss_itself() -> None:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.margin = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return (out.mean(1) - y - self.margin).square().mean()

    inputs = {"x": (None, 8), "y": (None,)}
    with pytest.raises(GraphftError, match=r"the loss depends on loss_fn\.margin, "):
        graphft.build(nn.Linear(8, 4), Margin(), inputs, targets=["y"])


def test_a_result_that_was_computed_before() -> None:
    model = nn.Linear(8, 4)
    penalty = model.weight.square().mean()
    with pytest.raises(GraphftError, match=r"computed from parameter weight outside of loss_fn") as caught:
        build(lambda m, x: m(x).mean() + penalty, model)
    assert caught.value.rule == "outside"
    build(lambda m, x: m(x).mean() + m.weight.square().mean(), model)


def test_a_loss_that_trains_the_other_module_only() -> None:
    with pytest.raises(GraphftError, match=r"the loss depends on HEAD\."):
        build(lambda m, x: HEAD(m(x).detach()).mean())


def test_what_is_meant_to_stay_is_a_constant() -> None:
    teacher = nn.Linear(8, 4)

    def without_gradient(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return (model(x) - wanted).square().mean()

    def detached(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - teacher(x).detach()).square().mean()

    def frozen(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - teacher(x)).square().mean()

    for loss_fn in (without_gradient, detached, frozen):
        teacher.requires_grad_(loss_fn is not frozen)
        program = build(loss_fn)
        assert [v.type.shape for v in program.of_kind(Kind.CONST)] == [(4, 8), (4,)]


def test_both_in_one_module_train_both() -> None:
    program = build(plain, nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)))
    assert [v.name for v in program.of_kind(Kind.PARAM)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_gradient_penalty_of_the_input_is_no_such_tensor() -> None:
    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().mean()

    program = build(penalised)
    assert [v.name for v in program.of_kind(Kind.PARAM)] == ["weight", "bias"]


class Averaging(nn.Linear):
    """Keeps an average in a plain attribute."""

    average: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.average = y.detach().mean()
        return y


def test_what_the_loss_keeps_for_later_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Found by a user: a history and an average of the weights had one entry, of tensors without data."""
    history: list[Tensor] = []
    shadow = {"weight": torch.zeros(4, 8)}

    def loss_fn(model: nn.Linear, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        history.append(loss.detach())
        shadow["weight"] = shadow["weight"] * 0.9 + model.weight.detach() * 0.1
        return loss

    build(loss_fn)
    assert "loss_fn keeps what it computes in history[0], shadow['weight']: that happens once" in caplog.text
    caplog.clear()
    build(plain, Averaging(8, 4))
    assert "keeps what it computes in model.average: " in caplog.text
    caplog.clear()
    build(plain, nn.Sequential(nn.Linear(8, 4), HEAD))
    assert "keeps" not in caplog.text
