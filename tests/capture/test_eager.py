"""`capture=False`: a step is one op that runs the pickled module, whatever its code does, and changes buffers alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.ir import Kind
from graphft.transpiler.prediction import with_weights
from tests.support.eager import INPUTS, Net, assert_trains_like_torch, batches, classify, sgd
from tests.support.golden import assert_golden
from tests.support.scripts import run


def by_sign(net: Net, h: Tensor) -> Tensor:
    return h * 2 if h.sum().item() > 0 else h.tanh()


def in_place(net: Net, h: Tensor) -> Tensor:
    net.seen += h.detach().abs().mean()
    return h * net.seen


def assigned(net: Net, h: Tensor) -> Tensor:
    net.seen = net.seen * 0.9 + h.detach().abs().mean()
    return h * net.seen


def hooked(net: Net, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g * net.b.weight.abs().mean())
    return h


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = classify(model, x, y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def with_extras(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    return F.cross_entropy(out, y), {"accuracy": (out.argmax(1) == y).float().mean(), "out": out}


def with_accuracy(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss, extras = with_extras(model, x, y)
    return loss, {"accuracy": extras["accuracy"]}


def tied() -> nn.Module:
    net = Net()
    net.extra = nn.Linear(8, 16)
    net.extra.weight = net.a.weight
    net.code = lambda net, h: h + net.extra(h[:, :8])
    return net


def frozen() -> nn.Module:
    net = Net(by_sign)
    net.a.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [
        (lambda: Net(by_sign), with_extras),
        (lambda: Net(in_place), classify),
        (lambda: Net(assigned), classify),
        (lambda: Net(hooked), classify),
        (Net, penalised),
        (tied, classify),
        (frozen, classify),
    ],
    ids=["data", "in place", "assigned", "hook", "penalty", "tied", "frozen"],
)
def test_it_trains_like_torch(make: Callable[[], nn.Module], loss_fn: Any) -> None:
    torch.manual_seed(0)
    program = assert_trains_like_torch(make(), loss_fn, INPUTS, batches(), sgd(0.2, 0.9), capture=False)
    assert [op.type for op in program.blocks["step"].ops] == ["eager_step"]
    if loss_fn is with_extras:
        assert program.attrs["extras"] == ("accuracy", "out")
        assert program.variables["out"].type.shape == ("batch", 3)


def locked() -> nn.Module:
    net = Net()
    net.lock = threading.Lock()
    return net


@pytest.mark.parametrize(
    ("make", "options", "rule"),
    [
        (locked, {"capture": False}, "capture"),
        (Net, {"capture": False, "example": {"x": torch.ones(8, 8)}}, "example"),
        (Net, {"capture": False, "example": {"x": torch.ones(8, 8), "y": torch.ones(8)}}, "example"),
        (lambda: Net(lambda net, h: h @ h), {"capture": False}, "example"),
        (Net, {"example": batches(1)[0]}, "option"),
        (lambda: Net(lambda net, h: h + net.a.bias.data.mul_(2)), {"capture": False}, "parameter-written"),
    ],
    ids=["lock", "missing", "dtype", "fails", "with capture", "written"],
)
def test_refused(make: Callable[[], nn.Module], options: Any, rule: str) -> None:
    with pytest.raises(GraphftError, match=rf"(?s)^error\[{rule}\].*help: "):
        graphft.build(make(), classify, INPUTS, **options)


def now_and_then(net: Net, h: Tensor) -> Tensor:
    if h.shape[0] == 4:
        net.seen += 1
    return h


def test_the_example_changes_all_that_is_ever_changed() -> None:
    program = graphft.build(Net(now_and_then), classify, INPUTS, capture=False)
    executor = graphft.Executor(check=False)
    executor.run(program, batches(1)[0])
    few = {name: column[:4] for name, column in batches(1)[0].items()}
    with pytest.raises(GraphftError, match=r"^error\[example\]"):
        executor.run(program, few)
    again = graphft.build(Net(now_and_then), classify, INPUTS, capture=False, example=few)
    assert again.variables["seen"].kind is Kind.BUFFER


def test_code_of_another_digest_is_refused() -> None:
    program = graphft.build(Net(), classify, INPUTS, capture=False)
    program.blocks["step"].ops[0].attrs["source"] = "0" * 16
    with pytest.raises(GraphftError, match="0" * 16):
        graphft.Executor(check=False).run(program, batches(1)[0])


def test_a_job_is_printed_validates_and_predicts() -> None:
    """The digest of the code, the code's size and its line are of no concern."""
    torch.manual_seed(0)
    model = Net(by_sign)
    program = graphft.build(model, with_accuracy, INPUTS, capture=False, name="eager")
    program.blocks["step"].ops[0].loc = ""
    text = str(program)
    graphft.minimize(program, graphft.SGD(lr=0.1), model=model)
    columns = {name: torch.cat([batch[name] for batch in batches()]) for name in ("x", "y")}
    data = graphft.arrays(**columns, chunk_size=16)
    job = graphft.transpile(
        program,
        data=data,
        trainers=2,
        pservers=1,
        ft=True,
        batch_size=8,
        name="eager",
        validate=graphft.Validation(data=data, every=4),
        predict=lambda model, x: model(x).softmax(1),
    )
    source = program.blocks["step"].ops[0].attrs["source"]
    size = str(program.values["module@CODE"].numel())
    whole = f"{text}\n\n{job.trainer_program()}"
    assert_golden(whole.replace(source, "SOURCE").replace(f"uint8[{size}]", "uint8[SIZE]"), "eager_job")
    assert job.evaluation is not None
    assert job.evaluation.blocks["step"].ops[0].type == "eager_forward"
    assert job.prediction is not None
    program = with_weights(job.prediction, model.state_dict())
    x = batches(1)[0]["x"]
    (found,) = graphft.Executor().run(program, {"x": x}, program.attrs["extras"]).values()
    assert torch.equal(found, model.eval()(x).softmax(1))


PICKLED = {"x": (None, 4)}
POINTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Averaged(nn.Module):
    """A target that follows the online net, as of BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                old.mul_(0.5).add_(new, alpha=0.5)
        return self.online(x) - self.target(x).detach() + 1


def quarter(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.25)


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_hook(lambda gradient: gradient * 0.5)
        self.bias.register_post_accumulate_grad_hook(quarter)


@pytest.mark.parametrize("make", [Averaged, Hooked])
def test_steps_as_of_torch(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    assert_trains_like_torch(model, square, PICKLED, [{"x": POINTS}] * 4, twin=twin, capture=False)


SCRIPT = """
import sys, torch, graphft
from torch import nn
sys.path.insert(0, {folder!r})
import mine
sys.modules["of_two_names"] = mine
{change}
class Net(nn.Linear):
    def forward(self, x):
        if "sum" in {{"mean", "sum", "none", "other"}}: x = x * mine.SCALE
        return super().forward(x)
torch.manual_seed(0)
p = graphft.build(Net(4, 4), lambda m, x: mine.loss(m(x)), {{"x": (None, 4)}}, capture=False)
graphft.save_program(p, {out!r})
print(p.block("step").ops[0].attrs["source"])
"""


@pytest.mark.slow
def test_code_of_own_modules_goes_with_its_globals(tmp_path: Path) -> None:
    """A module that another process imports does not have what the script has set in it."""
    (tmp_path / "mine.py").write_text("SCALE = 1\ndef loss(y): return (y * SCALE).square().mean()\n")

    def digest(change: str, seed: str) -> str:
        code = SCRIPT.format(folder=str(tmp_path), change=change, out=str(tmp_path / "program"))
        done = run(code, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    plain = digest("", "1")
    assert digest("# a comment", "2") == plain
    assert digest("mine.SCALE = 10", "3") != plain
    program = graphft.load_program(tmp_path / "program")
    weight, bias = program.values["weight"], program.values["bias"]
    loss = graphft.Executor().run(program, {"x": POINTS}, "loss")["loss"]
    assert torch.equal(loss, (F.linear(POINTS * 10, weight, bias) * 10).square().mean())
