"""`minimize` appends to a program what evolves it, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphft
from graphft import GraphftError, Kind, Program, Type
from graphft.ir.parser import parse
from tests.support.golden import assert_golden


def linear(params: int = 1) -> Program:
    """`loss = mean(w * x)` by hand: w@GRAD is a view of x, expanded."""
    program = Program("linear")
    x = program.variable("x", Type("float32", (4,)), Kind.INPUT)
    block = program.block("step")
    grad = block.append_op("aten.div.Tensor", x, 4.0)
    for i in range(params):
        program.variable(f"w{i}", Type("float32", (3, 4)), Kind.PARAM, torch.zeros(3, 4))
        block.append_op("aten.expand", grad, (3, 4), outputs=f"w{i}@GRAD")
    return program


def captured(module: nn.Module) -> Program:
    return graphft.build(module, lambda m, x: m(x).square().mean(), {"x": (None, 3)}, name="tiny")


def test_golden_of_a_whole_program() -> None:
    program = captured(nn.Linear(3, 2))
    rate = graphft.schedule.linear_warmup(graphft.schedule.cosine(1e-3, 1000), 100)
    graphft.minimize(program, graphft.AdamW(rate, weight_decay=0.1), graphft.ClipByGlobalNorm(1.0))
    assert_golden(str(program), "optim_adamw")
    assert parse(str(program)) == program


@pytest.mark.parametrize("clip", [graphft.ClipByValue(0.5), graphft.ClipByGlobalNorm(1e-3)])
def test_gradients_that_share_memory_are_clipped_once(clip: object) -> None:
    program = linear(params=2)
    graphft.minimize(program, graphft.SGD(1.0), clip)
    executor = graphft.Executor()
    x = torch.tensor([1.0, -4.0, 8.0, 0.0])
    executor.run(program, {"x": x})
    grads = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(2)]
    for g in grads:
        g.grad = (x / 4).expand(3, 4).clone()
    if isinstance(clip, graphft.ClipByValue):
        nn.utils.clip_grad_value_(grads, clip.limit)
    else:
        nn.utils.clip_grad_norm_(grads, clip.max_norm)
    for i, g in enumerate(grads):
        torch.testing.assert_close(executor.state(program)[f"w{i}"], -g.grad)


def refused(program: Program, rule: str, *arguments: Any, **options: Any) -> None:
    before = str(program)
    with pytest.raises(GraphftError, match=rf"(?s)^error\[{rule}\].*help: "):
        graphft.minimize(program, *arguments, **options)
    assert str(program) == before


def test_what_cannot_be_minimized() -> None:
    program = linear()
    refused(Program(), "minimize", graphft.SGD())
    refused(program, "schedule", graphft.SGD(lr=lambda step: 0.1 if step < 5 else 0.01))
    for clip in (1.0, graphft.ClipByValue, graphft.SGD(0.1)):
        refused(program, "optimizer-option", graphft.SGD(), clip)
    refused(program, "optimizer-option", nn.Linear(3, 2))
    program.variable("unused", Type("float32", (2,)), Kind.PARAM, torch.zeros(2))
    refused(program, "no-gradient", graphft.SGD())
    program = linear()
    graphft.minimize(program, graphft.SGD())
    refused(program, "minimize", graphft.SGD())


@pytest.mark.parametrize(
    "make",
    [
        lambda: graphft.SGD(-0.1),
        lambda: graphft.SGD("0.1"),
        lambda: graphft.SGD(0.1, nesterov=True),
        lambda: graphft.Adam(betas=(0.9, 1.0)),
        lambda: graphft.Adam(lr=graphft.schedule.constant(0.1), eps=-1.0),
    ],
)
def test_options_out_of_range(make: Callable) -> None:
    with pytest.raises(GraphftError, match=r"^error\[optimizer-option\]"):
        make()


def test_parameters_in_no_group_are_told(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    program = captured(module)
    graphft.minimize(program, torch.optim.SGD(module[1].parameters(), 0.1), model=module)
    assert "will not train: 0.weight, 0.bias" in caplog.text


VECTOR, SCALAR, COUNT = Type("float32", (8,)), Type("float64", ()), Type("float32", ())


@pytest.mark.parametrize(
    ("types", "attrs", "rule"),
    [
        ((VECTOR, Type("float32", (9,)), SCALAR), {}, "optimizer-operand"),
        ((VECTOR, VECTOR, VECTOR), {}, "optimizer-operand"),
        ((VECTOR, VECTOR, SCALAR), {"momentum": 0.9}, "optimizer-operand"),
        ((VECTOR, VECTOR, SCALAR, VECTOR, COUNT), {}, "optimizer-operand"),
        ((VECTOR, VECTOR, SCALAR, Type("float32", (9,)), COUNT), {"momentum": 0.9}, "optimizer-operand"),
        ((VECTOR, VECTOR, SCALAR), {"momentum": -1.0}, "optimizer-option"),
    ],
)
def test_operands_that_do_not_fit(types: tuple[Type, ...], attrs: dict, rule: str) -> None:
    block = Program("by-hand").block("step")
    operands = [block.program.variable(name, t, Kind.STATE) for name, t in zip("abcde", types, strict=False)]
    with pytest.raises(GraphftError, match=rf"^error\[{rule}\]"):
        block.append_op("sgd", *operands, **attrs)
    assert block.ops == []


def test_weights_that_were_loaded_after_build_are_not_ignored() -> None:
    """Training would begin with the values that build copied, without a word."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("holes", torch.tensor([float("nan"), 1.0]))
    program = graphft.build(model, lambda model, x: model(x).square().mean(), {"x": (None, 3)})
    with torch.no_grad():
        model[0].weight.add_(1.0)
    refused(program, "weights", torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    with torch.no_grad():
        model[0].weight.copy_(program.values["0.weight"])
    graphft.minimize(program, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
