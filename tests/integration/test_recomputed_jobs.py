"""Jobs of what a program once lost: recomputed blocks with dropout, and modules that run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphft
from graphft.ir import Program
from tests.integration import training
from tests.integration.plays import Act, Pace, assert_same_bits, at, kill, play

pytestmark = pytest.mark.timeout(600)


def program(capture: bool) -> Program:
    """Batch norm, dropout, and with `capture` a checkpoint, else a step that depends on data. The class is
    local: roles do not import the tests."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.bn, self.recomputed = nn.Linear(8, 32), nn.BatchNorm1d(32), capture
            self.b = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.bn(self.a(x))
            if self.recomputed:
                return checkpoint(self.b, h, use_reentrant=False)
            return self.b(h * 2 if h.sum().item() > 0 else h)

    torch.manual_seed(3)
    loss_fn = lambda model, x, y: nn.functional.cross_entropy(model(x), y)  # noqa: E731
    made = graphft.build(Net(), loss_fn, {"x": (None, 8), "y": ((None,), torch.int64)}, capture=capture)
    graphft.minimize(made, graphft.Adam(lr=0.02))
    return made


@pytest.mark.slow
@pytest.mark.chaos
def test_the_bits_do_not_depend_on_who_dies(folder: Path, pace: Pace) -> None:
    source = program(capture=False)
    options = {"trainers": 2, "epochs": 2}
    pace.set(0)
    undisturbed = play(training.job(source, pace=pace.file, **options), folder / "undisturbed")
    pace.set(0.05)
    disturbed = play(
        training.job(source, pace=pace.file, lease_ttl=60, **options),
        folder / "disturbed",
        [
            Act(lambda s: at(8)(s) and len(s.trainers) == 2, kill("trainer", 1)),
            Act(lambda s: at(16)(s) and len(s.trainers) == 2 and bool(s.checkpoint), kill("pserver", 0)),
            Act(lambda s: s.generation == 1 and at(20)(s), lambda _: pace.set(0)),
        ],
    )
    assert_same_bits(disturbed.state, undisturbed.state)
    assert disturbed.result.preemptions or "restarted" in disturbed.events
