"""Parameters in any memory layout, and reparametrized ones, train as torch.optim trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import graphft
from graphft.errors import GraphftError
from tests.support.eager import INPUTS, assert_trains_like_torch, batches, classify, sgd


class Turned(nn.Module):
    """Its weight is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


@pytest.mark.parametrize("capture", [True, False])
def test_a_transposed_parameter_trains_like_torch(capture: bool) -> None:
    """A program's is contiguous, so that its matrix products are other kernels."""
    torch.manual_seed(0)
    model = Turned()
    options = {"exact": not capture, "capture": capture}
    program = assert_trains_like_torch(model, classify, INPUTS, batches(3), sgd(2.0, 0.9), **options)
    assert program.values["w"].is_contiguous()
    assert not model.w.is_contiguous()


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("wrap", "capture"),
    [
        *((wrap, capture) for wrap in (spectral_norm, weight_norm) for capture in (True, False)),
        (parametrizations.spectral_norm, True),
        (parametrizations.weight_norm, True),
        (parametrizations.orthogonal, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_reparametrized(wrap: Any, capture: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, twin, feeds = wrapped(wrap), wrapped(wrap), batches(3)
    model(feeds[0]["x"]).sum().item()  # used before it is built
    twin.load_state_dict(model.state_dict())
    exact = wrap is not parametrizations.orthogonal  # its result has another layout
    assert_trains_like_torch(model, classify, INPUTS, feeds, twin=twin, exact=exact, capture=capture)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_parametrizations_are_not_pickled() -> None:
    with pytest.raises(GraphftError) as caught:
        graphft.build(wrapped(parametrizations.weight_norm), classify, INPUTS, capture=False)
    assert caught.value.rule == "capture"
