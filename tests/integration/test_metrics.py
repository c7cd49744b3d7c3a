"""What `loss_fn` returns beside the loss, from the trainers of a real job to its result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.runtime.data import open_reader
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, play

pytestmark = pytest.mark.timeout(600)
RECORDS, CHUNK, BATCH = 30, 10, 4
"""Batches of 4, 4 and 2 records in each of three chunks."""


def run(folder: Path, pace: Pace | None = None, acts: Sequence[Act] = (), **options: Any) -> Played:
    """A job whose metric `number` is the mean of its samples' numbers, 0 to 29."""

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return model(x).square().mean(), {"number": x[:, 0].mean()}

    torch.manual_seed(0)
    program = graphft.build(nn.Linear(1, 1), loss_fn, {"x": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=1e-4))
    x = torch.arange(float(RECORDS))[:, None]
    data = training.paced(pace.file, CHUNK, x=x) if pace is not None else graphft.arrays(x=x, chunk_size=CHUNK)
    return play(graphft.transpile(program, chunks=data, batch_size=BATCH, **{"passes": 2, **options}), folder, acts)


def test_a_sync_step_is_the_mean_over_the_samples_of_all_slots(folder: Path) -> None:
    played = run(folder, trainers=2, ft=True)
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


@pytest.mark.slow
def test_a_unit_of_local_steps_is_the_mean_over_the_samples_of_its_batches(folder: Path) -> None:
    played = run(folder, sync=False, mode="half_async", local_steps=3)
    found = [value for _, value in played.result.metrics["number"]]
    assert sorted(found[:3]) == sorted(found[3:]) == pytest.approx([4.5, 14.5, 24.5])


@pytest.mark.slow
def test_the_status_has_the_newest_values(folder: Path, pace: Pace) -> None:
    told = Act(lambda status: 0 <= status.metrics.get("number", -1) < RECORDS, lambda _: pace.set(0))
    run(folder, pace, [told], passes=80)  # it has been seen when the job is over
