"""Programs that were built with capture=False carry the module, and a step changes buffers alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from tests.support.eager import assert_trains_like_torch

INPUTS = {"x": (None, 4)}
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


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
    assert_trains_like_torch(model, square, INPUTS, [{"x": X}] * 4, twin=twin, capture=False)


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
