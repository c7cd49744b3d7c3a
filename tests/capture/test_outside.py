"""What the loss would train in eager torch, but is no parameter of the model: refused, never a constant."""

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


class Margin(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = nn.Parameter(torch.ones(4))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (out - y - self.margin).square().mean()


MARGIN = Margin()


@pytest.mark.parametrize(
    ("model", "loss_fn", "tensor", "code"),
    [
        (None, by_global, "float32 of shape (2) (and 1 more)", by_global),
        (None, by_helper, "float32 of shape (2) (and 1 more)", by_global),
        (None, by_tensor, "float32 of shape (4),", by_tensor),
        (None, functools.partial(with_head, nn.Linear(4, 2)), "float32 of shape (2) (and 1 more)", with_head),
        (None, closed_over(), "float32 of shape (2) (and 1 more)", None),
        (None, lambda model, x: HEAD(model(x).detach()).mean(), "float32 of shape (2) (and 1 more)", None),
        (None, lambda model, x: MARGIN(model(x), x[:, :4]), "float32 of shape (4),", Margin.forward),
        (Listed(), plain, "float32 of shape (4) (and 1 more)", Listed.forward),
        (Attributed(), plain, "float32 of shape (4),", Attributed.forward),
    ],
    ids=["global", "helper", "tensor", "partial", "closure", "only-it", "of-loss", "list", "attribute"],
)
def test_refused(model: nn.Module | None, loss_fn: Any, tensor: str, code: Any) -> None:
    with pytest.raises(GraphftError) as caught:
        build(loss_fn, model)
    assert caught.value.rule == "outside"
    assert f"a trainable tensor, {tensor}" in caught.value.message
    if code is not None:
        line = code.__code__.co_firstlineno + 1
        assert f"test_outside.py:{line} in {code.__name__}" in caught.value.message


def test_a_result_that_was_computed_before() -> None:
    model = nn.Linear(8, 4)
    penalty = model.weight.square().mean()
    with pytest.raises(GraphftError, match="parameter weight") as caught:
        build(lambda m, x: m(x).mean() + penalty, model)
    assert caught.value.rule == "outside"
    build(lambda m, x: m(x).mean() + m.weight.square().mean(), model)


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
