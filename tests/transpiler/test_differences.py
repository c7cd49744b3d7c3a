"""How a corrected script's program differs from the saved one, in the words of the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphft
from graphft.transpiler.program_differences import program_differences


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def program(
    optimizer: Any = None, act: Callable[[], torch.nn.Module] = torch.nn.ReLU, hidden: int = 4, clip: Any = None
) -> graphft.Program:
    model = torch.nn.Sequential(torch.nn.Linear(3, hidden), act(), torch.nn.Linear(hidden, 1))
    made = graphft.build(model, loss_fn, inputs={"x": (None, 3), "y": (None, 1)})
    graphft.minimize(made, optimizer or graphft.Adam(lr=0.1), clip=clip)
    return made


def cosine(steps: int) -> graphft.Adam:
    return graphft.Adam(lr=graphft.schedule.cosine(0.1, steps))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {}, []),
        ({}, {"optimizer": graphft.Adam(lr=0.01)}, ["lr 0.1 -> 0.01"]),
        (
            {},
            {"optimizer": graphft.Adam(lr=0.01, betas=(0.8, 0.999))},
            ["betas (0.9, 0.999) -> (0.8, 0.999)", "lr 0.1 -> 0.01"],
        ),
        ({}, {"optimizer": graphft.SGD(lr=0.1)}, ["optimizer adam -> sgd"]),
        (
            {},
            {"hidden": 8},
            [
                "param 0.bias float32[4] -> float32[8]",
                "param 0.weight float32[4, 3] -> float32[8, 3]",
                "param 2.weight float32[1, 4] -> float32[1, 8]",
            ],
        ),
        (
            {"clip": graphft.ClipByGlobalNorm(1.0)},
            {"clip": graphft.ClipByGlobalNorm(2.0)},
            ["clip_by_global_norm max_norm 1.0 -> 2.0"],
        ),
    ],
)
def test_what_differs_is_named(old: dict[str, Any], new: dict[str, Any], expected: list[str]) -> None:
    assert program_differences(program(**old), program(**new)) == expected


def test_a_changed_line_of_the_model_is_named_with_its_op() -> None:
    (found,) = program_differences(program(), program(act=torch.nn.GELU))
    assert found.startswith("op 2 of the step: aten.relu -> aten.gelu (test_differences.py:")


def test_an_argument_of_an_op_that_differs_shows_both() -> None:
    (found,) = program_differences(
        program(act=lambda: torch.nn.LeakyReLU(0.1)), program(act=lambda: torch.nn.LeakyReLU(0.2))
    )
    assert "aten.leaky_relu(%addmm, 0.1) -> " in found
    assert "aten.leaky_relu(%addmm, 0.2)" in found


def test_a_schedule_that_did_not_change_is_not_named() -> None:
    """Found by a user: a metric more gives the schedule's temporaries other names."""

    def with_metric(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        found = model(x)
        return (found - y).square().mean(), {"error": (found - y).double().abs().mean()}

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    other = graphft.build(model, with_metric, inputs={"x": (None, 3), "y": (None, 1)})
    graphft.minimize(other, cosine(100))
    found = program_differences(program(cosine(100)), other)
    assert not [text for text in found if "schedule" in text], found
    assert found


def test_a_changed_schedule_is_named() -> None:
    (found,) = program_differences(program(cosine(100)), program(cosine(200)))
    assert found.startswith("op 1 of the learning rate's schedule: ")
    assert "100" in found
    assert "200" in found
