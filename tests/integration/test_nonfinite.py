"""Values that are not finite: the job stops and says where, or leaves the step out, on every shard, whatever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import graphft
from graphft import ir
from graphft.runtime.data import open_reader
from graphft.transpiler.job import Job
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, at, kill, play

pytestmark = pytest.mark.timeout(600)
RECORD, PASSES = 217, 2
STEPS = training.STEPS * PASSES // training.PASSES


def job(program: ir.Program, **options: Any) -> Job:
    return training.job(program, blobs={"nonfinite": RECORD}, **{"epochs": PASSES, **options})


def where(job: Job) -> list[tuple[int, int]]:
    """(step, slot) of the batches that hold the record."""
    config, plan = job.config, job.config.plan
    reader = open_reader(config.data, ".", config.seed)
    found = []
    for step in range(config.total_steps):
        for slot in range(plan.slots):
            if (w := plan.locate(step, slot)) is not None:
                x = reader.batch(w.pass_index, w.chunk, w.batch, config.batch_size)["x"]
                found += [(step, slot)] if not x.isfinite().all() else []
    return found


@pytest.fixture(scope="module")
def skipping(program: ir.Program, workplace: Path, nursery: Any) -> Played:
    from tests.integration.conftest import at_work

    with at_work(nursery):
        return play(job(program, on_nonfinite="skip"), workplace / "skipping")


def test_skipped_steps_count_for_the_schedule_and_for_nothing_else(skipping: Played) -> None:
    """Batch norm's statistics, Adam's moments and its own step stay as they were. Tolerance: see test_exact."""
    steps = {step for step, _ in where(skipping.job)}
    assert len(steps) == PASSES
    assert skipping.result.skipped_steps == PASSES
    assert skipping.result.steps == STEPS
    eager = training.trained_in_one_process(skipping.job, training.network(), skipped=steps)
    model = training.network()
    graphft.load_into(model, skipping.result.model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, eager[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert {int(v) for n, v in skipping.state.items() if n.endswith("@step")} == {STEPS - PASSES}
    told = [e for e in skipping.statuses[-1].events if e.kind == "nonfinite"]
    assert "the batch itself holds such values in column x (1 values), of record 217" in told[0].text


def test_skipped_steps_are_the_same_bits_whatever_dies(
    program: ir.Program, folder: Path, pace: Pace, skipping: Played
) -> None:
    first = where(skipping.job)[0][0]
    played = play(
        job(program, on_nonfinite="skip", pace=pace.file),
        folder,
        [
            Act(at(max(first - 1, 1)), kill("trainer", 0, 1)),
            Act(at(first + 2), kill("pserver", 1)),
            Act(lambda s: s.generation >= 1 and at(first + 4)(s), lambda _: pace.set(0)),
        ],
    )
    assert_same_bits(played.state, skipping.state)
    assert played.result.skipped_steps == PASSES
    assert max(status.skipped_steps for status in played.statuses) >= 1


def test_a_model_that_is_not_finite_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Losses and gradients are finite, but in the end a buffer is not."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    x = torch.randn(32, 4)
    x[3] = 1e25
    program = graphft.build(model, lambda m, x: m(x).mean(), {"x": (None, 4)})
    graphft.minimize(program, graphft.SGD(lr=1e-3))
    data = graphft.arrays(x=x, chunk_size=8)
    played = play(graphft.transpile(program, data=data, batch_size=8, on_nonfinite="warn"), folder)
    assert "the model is NOT FINITE: 0.running_var" in capfd.readouterr().err
    assert not load_file(played.result.model)["0.running_var"].isfinite().all()
