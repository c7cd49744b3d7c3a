"""What `minimize` appends to a program, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphft
from graphft import Block, GraphftError, Kind, Program, ProgramError, Type, Variable
from graphft.errors import UsageError
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


def model() -> nn.Module:
    return nn.Linear(3, 2)


def captured(module: nn.Module) -> Program:
    return graphft.build(module, lambda m, x: m(x).square().mean(), {"x": (None, 3)}, name="tiny")


def test_golden_of_a_whole_program() -> None:
    program = captured(model())
    rate = graphft.schedule.linear_warmup(graphft.schedule.cosine(1e-3, 1000), 100)
    graphft.minimize(program, graphft.AdamW(rate, weight_decay=0.1), graphft.ClipByGlobalNorm(1.0))
    assert_golden(str(program), "optim_adamw")
    assert parse(str(program)) == program


def test_golden_of_groups_and_clipping_by_value() -> None:
    module = model()
    program = captured(module)
    optimizer = torch.optim.SGD(
        [{"params": [module.weight], "momentum": 0.9, "nesterov": True}, {"params": [module.bias], "lr": 0.5}], lr=0.1
    )
    graphft.minimize(program, optimizer, graphft.ClipByValue(0.5), model=module)
    assert_golden(str(program), "optim_sgd_groups")
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


def test_state_starts_as_in_torch() -> None:
    program = linear()
    graphft.minimize(program, graphft.Adagrad(initial_accumulator_value=0.5))
    assert torch.equal(program.values["w0@sum"], torch.full((3, 4), 0.5))
    assert torch.equal(program.values["w0@step"], torch.zeros(()))
    assert program.variables["w0@step"].type == Type("float32", ())
    assert program.variables["global_step"].kind is Kind.STATE


def test_names_that_the_model_uses_are_avoided() -> None:
    program = linear()
    program.variable("lr", Type("float32", (1,)), Kind.BUFFER, torch.zeros(1))
    graphft.minimize(program, graphft.SGD())
    assert next(op for op in program.blocks["step"] if op.type == "sgd").args[2].name == "lr_1"


# -- refusals -------------------------------------------------------------------------------------------------


def test_minimize_twice() -> None:
    program = linear()
    graphft.minimize(program, graphft.SGD())
    with pytest.raises(ProgramError, match="minimized already"):
        graphft.minimize(program, graphft.SGD())


def test_no_step() -> None:
    with pytest.raises(ProgramError, match="has no block step"):
        graphft.minimize(Program(), graphft.SGD())


def test_a_parameter_without_gradient() -> None:
    program = linear()
    program.variable("unused", Type("float32", (2,)), Kind.PARAM, torch.zeros(2))
    before = str(program)
    with pytest.raises(ProgramError, match=r"(?s)no-gradient.*unused.*help: "):
        graphft.minimize(program, graphft.SGD())
    assert str(program) == before


def test_a_schedule_that_cannot_be_traced_changes_nothing() -> None:
    program = linear()
    before = str(program)
    with pytest.raises(GraphftError, match="schedule"):
        graphft.minimize(program, graphft.SGD(lr=lambda step: 0.1 if step < 5 else 0.01))
    assert str(program) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: graphft.SGD(-0.1), "SGD: Invalid learning rate: -0.1"),
        (lambda: graphft.SGD("0.1"), "SGD: "),
        (lambda: graphft.SGD(nn.Linear(1, 1).parameters(), lr=0.1), r"got a generator first.*SGD\(lr=\.\.\.\)"),
        (lambda: graphft.AdamW(nn.Linear(1, 1)), "got a Linear first, expected the learning rate"),
        (lambda: graphft.AdamW(lr=nn.Linear(1, 1)), "got a Linear as lr, expected the learning rate"),
        (lambda: graphft.AdamW(nn.Linear(1, 1).parameters), r"got the method Linear\.parameters first, expected"),
        (lambda: graphft.AdamW(params=nn.Linear(1, 1).parameters()), r"got a generator as params.*AdamW\(lr=\.\.\.\)"),
        (lambda: graphft.AdamW(lr=None), r"AdamW: lr is None, expected a number or a schedule\n.*give a float"),
        (lambda: graphft.AdamW(np.array(0.1)), r"AdamW: lr is array\(0\.1\), expected a number or a schedule"),
        (lambda: graphft.SGD(0.1, nesterov=True), "Nesterov momentum requires"),
        (lambda: graphft.Adam(betas=(0.9, 1.0)), "Invalid beta parameter at index 1"),
        (lambda: graphft.Adam(lr=graphft.schedule.constant(0.1), eps=-1.0), "Invalid epsilon"),
        (lambda: graphft.AdamW(weight_decay=-1.0), "AdamW: Invalid weight_decay"),
        (lambda: graphft.Adagrad(lr_decay=-1.0), "Invalid lr_decay"),
        (lambda: graphft.RMSprop(alpha=-1.0), "Invalid alpha"),
    ],
    ids=range(15),
)
def test_options_out_of_range(make: Callable, message: str) -> None:
    with pytest.raises(GraphftError, match=f"(?s){message}") as error:
        make()
    assert error.value.rule == "optimizer-option"


def test_a_schedule_may_be_a_method_of_a_model() -> None:
    class Model(nn.Linear):
        def rate(self, step: torch.Tensor) -> torch.Tensor:
            return 0.1 / (step + 1)

    assert callable(graphft.AdamW(Model(1, 1).rate).lr)


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="momentun"):
        graphft.SGD(0.1, momentun=0.9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.Adam(m.parameters(), capturable=True), "option capturable is not supported"),
        (lambda m: torch.optim.SGD(m.parameters(), differentiable=True), "option differentiable is not supported"),
        (lambda m: torch.optim.Adamax(m.parameters()), "optimizer Adamax is not supported"),
        (lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(7))]), r"not in the program.*\(7,\)"),
        (lambda m: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(m.parameters()), 5).optimizer, "lr_scheduler"),
        (lambda m: m, "minimize takes an optimizer, got Linear"),
    ],
    ids=["capturable", "differentiable", "adamax", "foreign", "scheduler", "no-optimizer"],
)
def test_torch_optimizers_that_are_not_supported(make: Callable, message: str) -> None:
    module = model()
    program = captured(module)
    before = str(program)
    with pytest.raises(GraphftError, match=message):
        graphft.minimize(program, make(module), model=module)
    assert str(program) == before


@pytest.mark.parametrize("clip", [1.0, graphft.ClipByValue, graphft.SGD(0.1)])
def test_a_clip_is_one_of_ours(clip: Any) -> None:
    program = captured(model())
    before = str(program)
    with pytest.raises(UsageError, match=r"a clip is expected, got .*(?s:.*)graphft\.ClipByGlobalNorm\(1\.0\)"):
        graphft.minimize(program, graphft.SGD(0.1), clip)
    assert str(program) == before


def test_a_torch_optimizer_needs_the_model() -> None:
    module = model()
    with pytest.raises(GraphftError, match=re.escape("minimize(..., model=model)")):
        graphft.minimize(captured(module), torch.optim.SGD(module.parameters()))


# -- ops by hand ----------------------------------------------------------------------------------------------


@pytest.fixture
def block() -> Block:
    return Program("by-hand").block("step")


def declare(block: Block, **types: Type) -> list[Variable]:
    return [block.program.variable(name, t, Kind.STATE) for name, t in types.items()]


VECTOR, SCALAR, COUNT = Type("float32", (8,)), Type("float64", ()), Type("float32", ())


@pytest.mark.parametrize(
    ("types", "attrs", "message"),
    [
        ((VECTOR, Type("float32", (9,)), SCALAR), {}, "gradient %b is float32"),
        ((VECTOR, VECTOR, VECTOR), {}, "learning rate %c must be"),
        ((VECTOR, VECTOR, SCALAR), {"momentum": 0.9}, r"takes state \(momentum_buffer, step\)"),
        ((VECTOR, VECTOR, SCALAR, VECTOR, COUNT), {}, "takes state"),
        ((VECTOR, VECTOR, SCALAR, Type("float32", (9,)), COUNT), {"momentum": 0.9}, "state %d is"),
        ((VECTOR, VECTOR, SCALAR), {"momentum": -1.0}, "Invalid momentum"),
        ((VECTOR, VECTOR, SCALAR), {"momentum": "a lot"}, "attribute-type"),
        ((VECTOR, VECTOR, SCALAR), {"betas": (0.1, 0.2)}, "sgd has no attribute betas"),
        ((VECTOR, VECTOR), {}, "takes operands"),
    ],
    ids=range(9),
)
def test_operands_that_do_not_fit(block: Block, types: tuple[Type, ...], attrs: dict, message: str) -> None:
    operands = declare(block, **dict(zip("abcde", types, strict=False)))
    with pytest.raises(GraphftError, match=message):
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
    with pytest.raises(GraphftError, match=r"were changed after build\(\), which copied them: 0\.weight") as caught:
        graphft.minimize(program, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert "before build()" in caught.value.help
    with torch.no_grad():
        model[0].weight.copy_(program.values["0.weight"])
    graphft.minimize(program, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
