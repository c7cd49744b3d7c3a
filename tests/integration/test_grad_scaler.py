"""Kills show neither in the weights nor in the scale of a job under float16 with a gradient scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.runtime.data import open_reader
from tests.integration import training
from tests.integration.plays import Act, Pace, at, kill, play
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.timeout(600)
SCALER = graphft.GradScaler(init_scale=2.0**26, growth_interval=5)


def in_half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return nn.functional.cross_entropy(model(x), y)


@pytest.mark.slow
def test_scale_and_weights_have_the_bits_of_one_process_whatever_is_killed(folder: Path, pace: Pace) -> None:
    program = graphft.build(training.network(), in_half, {"x": (None, 8), "y": ((None,), torch.int64)})
    graphft.minimize(program, graphft.Adam(lr=0.02), graphft.ClipByGlobalNorm(0.5), grad_scaler=SCALER)
    job = training.job(program, pace=pace.file, on_nonfinite="skip", checkpoint_every=7, recovery_timeout=120)
    played = play(
        job,
        folder,
        [
            Act(at(3), kill("trainer", 1)),
            Act(at(16), kill("pserver", 1)),
            Act(lambda s: at(21)(s) and s.generation == 1, kill("trainer", 0, 2)),
            Act(lambda s: at(28)(s) and len(s.trainers) == 3, kill("pserver", 0)),
            Act(lambda s: s.generation == 2, lambda _: pace.set(0)),
        ],
    )
    reader = open_reader(training.job(program, on_nonfinite="skip").config.data, ".", job.config.seed)
    alone = InProcess(job, lambda w: reader.batch(w.pass_index, w.chunk, w.batch, job.config.batch_size))
    scales: list[tuple[int, float]] = []
    for step in range(job.config.total_steps):
        scales.append((step, scope_of(alone)["loss_scale"].item()))
        alone.run_step(step)
    weights, model = graphft.read_weights(played.result.model), alone.model()
    assert not [n for n, value in model.items() if not torch.equal(weights[n], value)]
    assert played.state["loss_scale"].item() == scope_of(alone)["loss_scale"].item()
    assert played.state["loss_scale@growth_tracker"].item() == scope_of(alone)["loss_scale@growth_tracker"].item()
    assert played.result.skipped_steps == len(alone.skipped) > 10, "it overflows at first, and again as it grows"
    assert alone.skipped[-1] > 28
    assert played.result.metrics["loss_scale"] == scales


def scope_of(run: InProcess) -> dict[str, Any]:
    return next(shard.scope for shard in run.shards.shards if "loss_scale" in shard.scope)
