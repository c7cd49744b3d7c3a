"""A metric that `loss_fn` returns, from the trainers of a real job to its result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.runtime.data import open_reader
from tests.integration.plays import play

pytestmark = pytest.mark.timeout(600)
RECORDS, CHUNK, BATCH = 30, 10, 4
"""Batches of 4, 4 and 2 records in each of three chunks."""


def test_a_sync_step_is_the_mean_over_the_samples_of_all_slots(folder: Path) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return model(x).square().mean(), {"number": x[:, 0].mean()}

    torch.manual_seed(0)
    program = graphft.build(nn.Linear(1, 1), loss_fn, {"x": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=1e-4))
    x = torch.arange(float(RECORDS))[:, None]
    data = graphft.arrays(x=x, chunk_size=CHUNK)
    played = play(graphft.transpile(program, data=data, batch_size=BATCH, epochs=2, trainers=2), folder)
    config = played.job.config
    reader = open_reader(config.data, folder, config.seed)
    expected = []
    for step in range(config.total_steps):
        works = [work for slot in range(2) if (work := config.plan.locate(step, slot))]
        batches = [reader.batch(w.pass_index, w.chunk, w.batch, BATCH)["x"] for w in works]
        expected.append((step, pytest.approx(torch.cat(batches).mean().item())))
    assert {len(reader.batch(0, 0, b, BATCH)["x"]) for b in range(3)} == {4, 2}
    assert played.result.metrics["number"] == expected
    assert [step for step, _ in played.result.metrics["loss"]] == list(range(config.total_steps))
