"""Values that are not finite: the job stops and says where, or leaves the step out, on every shard."""

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
from tests.integration.plays import assert_model, play

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


def test_skipped_steps_count_for_the_schedule_and_for_nothing_else(program: ir.Program, folder: Path) -> None:
    """Batch norm's statistics, Adam's moments and its own step stay as they were."""
    skipping = play(job(program, on_nonfinite="skip"), folder)
    steps = {step for step, _ in where(skipping.job)}
    assert len(steps) == PASSES
    assert skipping.result.skipped_steps == PASSES
    assert skipping.result.steps == STEPS
    eager = training.trained_in_one_process(skipping.job, training.network(), skipped=steps)
    assert_model(skipping.result.model, eager)
    assert {int(v) for n, v in skipping.state.items() if n.endswith("@step")} == {STEPS - PASSES}
    told = [e for e in skipping.statuses[-1].events if e.kind == "nonfinite"]
    assert "the batch itself holds such values in column x (1 values), of record 217" in told[0].text


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
