"""Parameters in any memory layout, and reparametrized ones, train as torch.optim trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import graphft
from graphft.errors import GraphftError
from tests.support.eager import assert_trains_like_torch, sgd


class Turned(nn.Module):
    """Its weight is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def case(make: Callable[[], nn.Module], steps: int = 3) -> tuple[nn.Module, dict[str, Any], list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = make()
    shape = (3, 5, 5) if isinstance(model, nn.Sequential) else (8,)
    batches = [{"x": torch.randn(6, *shape), "y": torch.arange(6) % 3} for _ in range(steps)]
    return model, {"x": (None, *shape), "y": ((None,), torch.int64)}, batches


@pytest.mark.parametrize("capture", [True, False])
def test_a_transposed_parameter_trains_like_torch(capture: bool) -> None:
    """A program's is contiguous, so that its matrix products are other kernels."""
    model, inputs, batches = case(Turned)
    program = assert_trains_like_torch(
        model, classify, inputs, batches, sgd(2.0, 0.9), exact=not capture, capture=capture
    )
    assert program.values["w"].is_contiguous()
    assert not model.w.is_contiguous()


def of(wrap: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: wrap(nn.Linear(8, 3), **options)


@pytest.mark.parametrize(
    ("wrap", "capture"),
    [
        (spectral_norm, True),
        (spectral_norm, False),
        (weight_norm, True),
        (weight_norm, False),
        (parametrizations.spectral_norm, True),
        (parametrizations.weight_norm, True),
        (parametrizations.orthogonal, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_reparametrized(wrap: Any, capture: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs, batches = case(of(wrap))
    if wrap is not spectral_norm and wrap is not weight_norm:
        model(batches[0]["x"])  # used before it is built
        twin = copy.deepcopy(model)
    else:  # their plain attribute `weight` is a result, which cannot be copied
        twin = case(of(wrap))[0]
    model(batches[0]["x"]).sum().item()
    twin.load_state_dict(model.state_dict())
    exact = wrap is not parametrizations.orthogonal  # its result has another layout
    assert_trains_like_torch(model, classify, inputs, batches, twin=twin, exact=exact, capture=capture)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_parametrizations_are_not_pickled() -> None:
    model, inputs, _ = case(of(parametrizations.weight_norm))
    with pytest.raises(GraphftError) as caught:
        graphft.build(model, classify, inputs, capture=False)
    assert caught.value.rule == "capture"
