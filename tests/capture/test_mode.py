"""What build and minimize say of a model in eval mode, and of parameters that do not train."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphft


class Asking(nn.Linear):
    """Its dropout is a function's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), training=self.training)


def build(model: nn.Module) -> graphft.Program:
    return graphft.build(model, lambda model, x: model(x).square().mean(), {"x": (None, 8)})


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level]


@pytest.mark.parametrize(
    ("part", "effect"),
    [
        (lambda: nn.Dropout(0.1), r"dropout is off (1); "),
        (lambda: nn.BatchNorm1d(4), r"normalization uses its running statistics, and keeps them (1); "),
        (lambda: Asking(4, 4), "code that asks self.training sees False (1); "),
        (lambda: nn.Sequential(*map(nn.Dropout, [0.1] * 7)), "dropout is off (1.0, 1.1, 1.2, 1.3, 1.4 and 2 more)"),
    ],
)
def test_eval_mode_is_told(part: Callable[[], nn.Module], effect: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 4), part())
    build(model)
    assert lines(caplog, logging.WARNING) == []
    build(model.eval())
    (told,) = lines(caplog, logging.WARNING)
    assert told.startswith(f"the model is captured in eval mode: {effect}")
    assert "model.train()" in told


def test_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    build(nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Dropout(0.0)).eval())
    part = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    part[1].eval()  # a part alone: as is usual for batch norm when a model is trained further
    build(part)
    assert lines(caplog, logging.WARNING) == []


def test_parameters_in_no_group_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    program = build(model)
    graphft.minimize(program, torch.optim.SGD(model[1].parameters(), 0.1), model=model)
    (told,) = lines(caplog, logging.WARNING)
    assert told == "2 parameters are in no group of the optimizer, and will not train: 0.weight, 0.bias"


def test_frozen_parameters_are_one_line_of_information(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    with caplog.at_level(logging.INFO):
        program = build(model)
        graphft.minimize(program, torch.optim.SGD(model.parameters(), 0.1), model=model)
    assert lines(caplog, logging.WARNING) == []
    assert lines(caplog, logging.INFO) == ["frozen, by requires_grad=False: 0.weight, 0.bias"]
