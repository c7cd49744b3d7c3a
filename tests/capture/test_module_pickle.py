"""What travels with a program that was built with capture=False, and what a step may change: found under attack."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.capture.module_pickle import unpack
from graphft.errors import GraphftError
from graphft.ops.context import Context
from graphft.ops.eager import eager_forward, eager_step

INPUTS = {"x": (None, 4)}
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(model: nn.Module, loss_fn: Callable[..., Any] = square, steps: int = 4) -> dict[str, Tensor]:
    program = graphft.build(model, loss_fn, INPUTS, capture=False)
    graphft.minimize(program, graphft.SGD(lr=0.1))
    executor = graphft.Executor()
    for _ in range(steps):
        executor.run(program, {"x": X.clone()})
    return graphft.state_dict(program, executor.scope(program))


def by_torch(model: nn.Module, loss_fn: Callable[..., Any] = square, steps: int = 4) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, x=X.clone()).backward()
        optimizer.step()
    return model.state_dict()


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
    model, before = make(), X.clone()
    expected = by_torch(make_like(make, model))
    found = trained(model)
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert torch.equal(X, before)


def make_like(make: Callable[[], nn.Module], model: nn.Module) -> nn.Module:
    other = make()
    other.load_state_dict(model.state_dict())
    return other


class Late(nn.Linear):
    ema: Tensor | None

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("ema", None)

    def forward(self, x: Tensor) -> Tensor:
        self.ema = x.mean(0) if self.ema is None else self.ema
        return super().forward(x - self.ema)


def test_a_buffer_that_a_step_makes_is_refused() -> None:
    with pytest.raises(GraphftError) as caught:
        graphft.build(Late(), square, INPUTS, capture=False)
    assert caught.value.rule == "buffer-type"


def test_results_have_their_names_whatever_their_order() -> None:
    order = iter((("a", "b"), ("b", "a"), ("a", "b"), *[("b", "a")] * 50))

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
        return square(model, x), {name: values[name] for name in next(order)}

    program = graphft.build(nn.Linear(4, 4), loss_fn, INPUTS, capture=False)
    executor = graphft.Executor(check=False)
    for _ in range(3):
        assert executor.run(program, {"x": X}, ["a", "b"]) == {"a": 1.0, "b": 2.0}


def test_generators_of_all_threads_are_left_alone_by_a_step_that_draws_from_none() -> None:
    """Another thread draws, or watches a Dataset for draws: validation beside a step once changed its dropout."""

    class Meanwhile(nn.Linear):
        seen: list[Any] | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.seen is not None:
                self.seen.append(random.getstate())
                random.random()  # as another thread would
            return super().forward(x)

    for training in (True, False):
        program = graphft.build(Meanwhile(4, 4), square, INPUTS, capture=False, training=training)
        packed = unpack(program.values["module@CODE"], str(program.block("step").ops[0].attrs["source"]))
        packed.model.seen = []  # type: ignore[assignment]
        before = random.getstate(), torch.get_rng_state()
        code, tensors = torch.ones(1), [t.detach() for t in (packed.model.weight, packed.model.bias)]
        context = Context(modules={id(code): packed})
        if training:
            eager_step(context, code, [X], tensors, [], [], source=packed.source)
        else:
            eager_forward(context, code, [X], tensors, source=packed.source)
        assert packed.model.seen == [before[0]]
        assert torch.equal(before[1], torch.get_rng_state())


def source(model: nn.Module, loss_fn: Any, **options: Any) -> str:
    program = graphft.build(model, loss_fn, INPUTS, capture=False, **options)
    return str(program.block("step").ops[0].attrs["source"])


def scaled(model: nn.Module, x: Tensor, by: float = 1.0) -> Tensor:
    return model(x).square().mean() * by


@pytest.mark.slow
def test_changed_code_has_another_digest() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    factors = {"a": 1.0}
    attribute = nn.Linear(4, 4)
    attribute.alpha = 5  # type: ignore[assignment]
    other = [
        source(plain, square),
        source(plain, functools.partial(scaled, by=2.0)),
        source(plain, functools.partial(scaled, by=3.0)),
        source(plain, lambda model, x: square(model, x) * factors["a"]),
        source(attribute, square),
        source(nn.Linear(4, 4).eval(), square),
    ]
    factors["a"] = 2.0
    other.append(source(plain, lambda model, x: square(model, x) * factors["a"]))
    assert len({*other}) == len(other)
    assert source(nn.Linear(4, 4), square) == other[0], "values of parameters are not code"


SCRIPT = """
import sys, torch, graphft
from torch import nn
sys.path.insert(0, {folder!r})
import mine
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
        env = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    plain = digest("", "1")
    assert digest("# a comment", "2") == plain
    assert digest("mine.SCALE = 10", "3") != plain
    program = graphft.load_program(tmp_path / "program")
    weight, bias = program.values["weight"], program.values["bias"]
    loss = graphft.Executor().run(program, {"x": X}, "loss")["loss"]
    assert torch.equal(loss, (F.linear(X * 10, weight, bias) * 10).square().mean())
