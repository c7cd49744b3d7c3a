"""A model's parts become variables and ops, and what cannot be captured is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.ir import Kind, Type

Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A linear layer, a buffer and a plain tensor, with the forward pass that a test gives."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.code = forward
        self.linear = nn.Linear(8, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.plain = torch.full((4,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) ** 2).mean()


def build(forward: Forward, **options: Any) -> graphft.Program:
    torch.manual_seed(0)
    return graphft.build(Model(forward), square, {"x": (None, 8)}, **options)


def line_of(function: Callable[..., Any], offset: int = 1) -> str:
    return f"test_capture.py:{function.__code__.co_firstlineno + offset}"


def test_kinds_of_variables() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.average.mul_(0.9).add_(y.detach().mean(0))
        return y * self.scratch + self.plain

    program = build(forward)
    kinds = {v.name: v.kind for v in program.variables.values() if v.kind is not Kind.TEMP}
    assert kinds == {
        "x": Kind.INPUT,
        "linear.weight": Kind.PARAM,
        "linear.bias": Kind.PARAM,
        "average": Kind.BUFFER,
        "scratch": Kind.CONST,
        "const": Kind.CONST,
    }
    assert program.variables["x"].type == Type("float32", ("batch", 8))
    assert torch.equal(program.values["const"], torch.full((4,), 2.0))
    assert program.variables["linear.weight@GRAD"].type == program.variables["linear.weight"].type


def assigned(self: Model, x: Tensor) -> Tensor:
    y = self.linear(x)
    self.average = self.average * 0.9 + y.detach().mean(0) * 0.1
    return y - self.average


def viewed(self: Model, x: Tensor) -> Tensor:
    y = self.linear(x)
    self.average[1:3] += y.detach().mean()
    self.scratch.view(2, 2)[0].mul_(2)
    return y - self.average - self.scratch


@pytest.mark.parametrize("forward", [assigned, viewed])
def test_buffers_change_like_eager(forward: Forward) -> None:
    program = build(forward)
    torch.manual_seed(0)
    model, executor = Model(forward), graphft.Executor()
    for size in (4, 7):
        x = torch.randn(size, 8)
        assert torch.equal(executor.run(program, {"x": x}, "loss")["loss"], square(model, x))
        assert torch.equal(executor.scope(program)["average"], model.average)
    assert program.variables["average"].kind is Kind.BUFFER
    if forward is viewed:
        assert program.variables["scratch"].attrs == {"persistent": False}
        assert "scratch" not in graphft.state_dict(program)


def test_targets_go_to_the_loss() -> None:
    model = nn.Linear(8, 3)
    inputs = {"x": (None, 8), "y": ((None,), torch.int64)}
    short = graphft.build(model, nn.CrossEntropyLoss(), inputs, targets=["y"])
    long = graphft.build(model, lambda model, x, y: F.cross_entropy(model(x), y), inputs)
    assert str(short) == str(long)


def test_ops_know_the_users_line() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.tanh(h)

    locs = {op.type: op.loc for op in build(forward).block("step").ops}
    assert locs["aten.addmm"] == f"{line_of(forward, 1)} in forward"
    assert locs["aten.tanh"] == locs["aten.tanh_backward"] == f"{line_of(forward, 2)} in forward"
    assert locs["aten.mean"] == f"{line_of(square)} in square"


def test_branches_on_sizes_are_recorded_and_checked() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.linear(x) * 2 if x.shape[0] > 3 else self.linear(x)

    program = build(forward)
    assert program.attrs["assume"] == (("batch > 3", f"{line_of(forward)} in forward"),)
    executor = graphft.Executor()
    assert executor.run(program, {"x": torch.ones(4, 8)}, "loss")["loss"] > 0
    with pytest.raises(GraphftError, match=r"error\[feed\].*captured for batch > 3 only .*got batch = 2"):
        executor.run(program, {"x": torch.ones(2, 8)})


@pytest.mark.parametrize("large", [lambda n: n / 9 > 1 / 3, lambda n: n**0.5 > 1.8, lambda n: 1 / n < 0.3])
def test_branches_on_floats_of_sizes_are_checked(large: Callable[[Any], bool]) -> None:
    program, executor = build(lambda self, x: self.linear(x) * (2 if large(x.shape[0]) else 1)), graphft.Executor()
    executor.run(program, {"x": torch.ones(4, 8)})
    with pytest.raises(GraphftError, match=r"error\[feed\].*got batch = 3"):
        executor.run(program, {"x": torch.ones(3, 8)})


def test_results_whose_size_depends_on_values() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y[y > 0]

    program = build(forward)
    assert Type("float32", ("unknown",)) in [v.type for v in program.variables.values()]
    torch.manual_seed(0)
    model, x = Model(forward), torch.randn(5, 8)
    loss = square(model, x)
    loss.backward()
    out = graphft.Executor().run(program, {"x": x}, ["loss", "linear.bias@GRAD"])
    assert torch.equal(out["loss"], loss)
    assert torch.equal(out["linear.bias@GRAD"], model.linear.bias.grad)


def item(self: Model, x: Tensor) -> Tensor:
    y = self.linear(x)
    return y * 2 if y.sum().item() > 0 else y


def plain_written(self: Model, x: Tensor) -> Tensor:
    y = self.linear(x)
    self.plain[0] += 1
    return y * self.plain


def weight_written(self: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.clamp_(-1, 1)
    return self.linear(x)


def bias_unused(self: Model, x: Tensor) -> Tensor:
    return x @ self.linear.weight.t()


@pytest.mark.parametrize(
    ("forward", "rule", "line"),
    [
        (item, "capture", 2),
        (lambda self, x: self.linear(x) + float(x.numpy().sum()), "capture", 0),
        (lambda self, x: self.linear(x) @ torch.ones(3, 3), "capture", 0),
        (lambda self, x: torch.dot(self.linear(x)[:, 0], x[:, 0].double()), "capture", 0),
        (lambda self, x: sum((self.linear(x) * i for i in range(x.shape[0])), torch.zeros(4)), "dimension", 0),
        (lambda self, x: self.linear(x[: int(x.shape[0] / 2)]), "dimension", 0),
        (lambda self, x: self.linear(x) * float(x.shape[0] // 2), "dimension", 0),
        (lambda self, x: self.linear(x) * (2.0 if (x.shape[0] > 2) & (x.shape[0] < 9) else 1.0), "dimension", 0),
        (plain_written, "constant-written", 2),
        (weight_written, "parameter-written", None),
        (bias_unused, "no-gradient", None),
        (lambda self, x: self.linear(x).detach(), "loss", None),
    ],
)
def test_refused(forward: Forward, rule: str, line: int | None) -> None:
    with pytest.raises(GraphftError) as caught:
        build(forward)
    assert caught.value.rule == rule
    assert caught.value.help
    if line is not None:
        assert line_of(forward, line) in str(caught.value)


def test_unused_parameters_can_be_allowed() -> None:
    program = build(bias_unused, allow_unused=True)
    assert program.variables["linear.bias"].kind is Kind.FROZEN
    assert "linear.bias" in graphft.state_dict(program)


@pytest.mark.parametrize(
    ("inputs", "rule"),
    [
        ({"x": (None, -1)}, "inputs"),
        ({"x": 8}, "inputs"),
        ({"x": "batch"}, "inputs"),
        ([(None, 8)], "inputs"),
        ({"x": ((None, 8), "float32")}, "inputs"),
        ({"loss": (None, 8)}, "inputs"),
        ({"weight": (None, 8)}, "model"),
    ],
)
def test_bad_inputs(inputs: dict[str, Any], rule: str) -> None:
    with pytest.raises(GraphftError, match=rf"^error\[{rule}\]"):
        graphft.build(nn.Linear(8, 4), lambda model, **given: square(model, *given.values()), inputs)


@pytest.mark.parametrize("capture", [True, False])
def test_a_memory_is_one_parameters(capture: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data.t()
    with pytest.raises(GraphftError, match="weight in one memory"):
        graphft.build(model, square, {"x": (None, 8)}, capture=capture)
    for layer, part in zip(model, torch.randn(2, 8, 8), strict=True):  # as cuDNN has an LSTM's
        layer.weight.data = part
    graphft.build(model, square, {"x": (None, 8)}, capture=capture)


def test_another_default_dtype_is_refused(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    with pytest.raises(GraphftError, match=r"^error\[dtype\]"):
        build(lambda self, x: self.linear(x))


def test_a_recurrent_network_needs_its_length_as_a_number() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].mean()

    with pytest.raises(GraphftError, match=r"dimension length must vary, but .* in loss_fn makes a number of it"):
        graphft.build(nn.GRU(4, 4), loss_fn, {"x": ("length", None, 4)})
    graphft.build(nn.GRU(4, 4), loss_fn, {"x": (5, None, 4)})


def test_models_that_cannot_be_captured_as_they_are() -> None:
    hooked = nn.Linear(8, 4)
    hooked.weight.register_hook(lambda g: g * 2)
    lazy, meta = nn.LazyLinear(4), nn.Linear(8, 4, device="meta")
    for model in (square, lazy, meta, nn.Linear(8, 4).requires_grad_(False), hooked):
        with pytest.raises(GraphftError, match=r"^error\[model\]"):
            graphft.build(model, square, {"x": (None, 8)})  # type: ignore[arg-type]


def test_eval_mode_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model[1].eval()  # a part alone: as is usual for batch norm when a model is trained further
    graphft.build(model, square, {"x": (None, 8)})
    assert not caplog.records
    graphft.build(model.eval(), square, {"x": (None, 8)})
    assert "captured in eval mode" in caplog.text
