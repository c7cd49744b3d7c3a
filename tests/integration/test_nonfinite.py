"""Values that are not finite: the job stops and says where, or leaves the step out, on every shard, whatever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import graphft
from graphft import ir
from graphft.errors import GraphftError
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.data import open_reader
from graphft.runtime.launcher.folder_status import look_at
from graphft.transpiler import Job
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, at, kill, play

pytestmark = pytest.mark.timeout(600)
RECORD, PASSES = 217, 2
STEPS = training.STEPS * PASSES // training.PASSES


def job(program: ir.Program, **options: Any) -> Job:
    return training.job(program, blobs={"nonfinite": RECORD}, **{"passes": PASSES, **options})


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


def finite_file(model: Path) -> bool:
    return all(bool(v.isfinite().all()) for n, v in load_file(model).items() if n != "mask")


def finite(played: Played) -> bool:
    model = training.network()
    graphft.load_into(model, played.result.model)
    return all(bool(v.isfinite().all()) for v in model.state_dict().values())


@pytest.fixture(scope="module")
def skipping(program: ir.Program, workplace: Path, nursery: Any) -> Played:
    """Nothing but the values happens to it."""
    from tests.integration.conftest import at_work

    with at_work(nursery):
        return play(job(program, on_nonfinite="skip"), workplace / "skipping")


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_job_stops_there_and_says_the_same_again(program: ir.Program, folder: Path, pace: Pace) -> None:
    stopping = job(program, checkpoint_every=1, pace=pace.file)
    step, slot = where(job(program))[0]  # without its pace
    for _ in range(2):
        with pytest.raises(GraphftError) as caught:
            play(stopping, folder)
        text = str(caught.value)
        assert f"step {step}, slot {slot} (batch " in text
        assert "the loss is nan; the gradients of " in text
        assert "in column x (1 values)" in text
        assert 'on_nonfinite="skip"' in text
    told = look_at(folder)
    assert (told.state, "the loss is nan" in told.describe()) == ("failed", True)
    assert all(found.step <= step for found in CheckpointStore(folder / "checkpoints").manifests())
    assert not (folder / "model.safetensors").exists()


def overflowing(what: str, **options: Any) -> Job:
    """Losses and gradients are finite, but in the end an update, a buffer or the optimizer's state is not."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randn(32)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if what == "update":
        optimizer, x, y = torch.optim.SGD(model.parameters(), lr=1e38), x[:8], y[:8] * 1e25  # in the only step
    elif what == "buffer":
        x[3] = 1e25
    elif what == "state":
        optimizer, y = torch.optim.Adam(model.parameters()), y * 1e25

    def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x)[:, 0] * y).mean()

    program = graphft.build(model, loss_fn, {"x": (None, 4), "y": (None,)})
    graphft.minimize(program, optimizer, model=model)
    data = graphft.arrays(x=x, y=y, chunk_size=8)
    return graphft.transpile(program, chunks=data, batch_size=8, passes=1, ft=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "named"), [("state", "exp_avg_sq")])
def test_what_no_loss_shows_ends_the_job_before_it_is_saved(folder: Path, what: str, named: str) -> None:
    with pytest.raises(GraphftError, match=r"are not finite, although losses and gradients were") as raised:
        play(overflowing(what), folder)
    assert named in raised.value.message
    assert "mask" not in raised.value.message, "it was so at first"
    assert not (folder / "model.safetensors").exists()


def test_a_model_that_is_not_finite_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    played = play(overflowing("buffer", on_nonfinite="warn"), folder)
    assert "the model is NOT FINITE: 0.running_var" in capfd.readouterr().err
    assert not finite_file(played.result.model)
