"""The local executor: feeds checked before anything runs, values kept from run to run, random numbers by seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphft
from graphft.errors import ProgramError
from graphft.ir import Kind, Program, Type
from tests.support.zoo import mlp


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    case = mlp()
    return graphft.build(case.model, case.loss_fn, case.inputs)


X, Y = torch.ones(3, 8), torch.ones(3, 4)


@pytest.mark.parametrize(
    "feed",
    [
        {"x": X},
        {"x": X, "y": Y, "z": Y},
        {"x": X.double(), "y": Y},
        {"x": X[0], "y": Y},
        {"x": torch.ones(3, 7), "y": Y},
        {"x": X, "y": torch.ones(4, 4)},
        {"x": X, "y": "text"},
        {"x": X, "y": np.ones((3, 4))},
    ],
)
def test_feeds_are_checked(program: Program, feed: dict[str, Any]) -> None:
    executor = graphft.Executor()
    with pytest.raises(ProgramError, match=r"^error\[feed\]"):
        executor.run(program, feed, "loss")
    assert not executor.scope(program).keys() & feed.keys()


def test_unknown_block_fetch_and_value(program: Program) -> None:
    executor, valueless = graphft.Executor(), Program("p")
    valueless.variable("w", Type("float32", (2,)), Kind.PARAM)
    valueless.block("step")
    for rule, run in {
        "no-block": lambda: executor.run(program, block="init"),
        "undeclared": lambda: executor.run(program, {"x": X, "y": Y}, ["nothing"]),
        "no-value": lambda: executor.run(valueless),
    }.items():
        with pytest.raises(ProgramError, match=rf"^error\[{rule}\]"):
            run()


def test_random_numbers_come_from_the_seed_and_the_run() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out = model(x)
        return out.mean(), {"out": out}

    program = graphft.build(model, loss_fn, {"x": (None, 8)})

    def masks(executor: graphft.Executor) -> list[torch.Tensor]:
        return [executor.run(program, {"x": X}, "out")["out"] == 0 for _ in range(2)]

    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    a, b, c = (masks(graphft.Executor(seed=s)) for s in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected), "the executor with a seed drew from torch's generator"
    assert all(map(torch.equal, a, b))
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a[0], c[0])


def test_a_program_that_changes_is_lowered_again(program: Program) -> None:
    program = program.clone()
    executor = graphft.Executor()
    executor.run(program, {"x": X, "y": Y}, "loss")
    block = program.block("step")
    program.variable("steps", Type("int64", ()), Kind.STATE, torch.tensor(5))
    block.append_op("aten.add_.Tensor", program.variables["steps"], 1, outputs=[None])
    for expected in (6, 7):
        assert executor.run(program, {"x": X, "y": Y}, "steps")["steps"] == expected
