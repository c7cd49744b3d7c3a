"""What the user's data or code does wrong is reported at once, and never hangs the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import graphft
from graphft import ir
from graphft.plan import Located, record_order
from tests.integration import training
from tests.integration.plays import SCRIPT, Act, Pace, Program, kill, play

pytestmark = pytest.mark.timeout(300)
BROKEN = 100


def test_a_chunk_that_cannot_be_read_is_left_out_and_the_rest_is_exact(
    program: ir.Program, folder: Path, pace: Pace, capfd: pytest.CaptureFixture[str]
) -> None:
    """After it is discarded a pserver dies, and everything is done again from the first step on: to the same end."""
    job = training.job(program, pace=pace.file, blobs={"broken": BROKEN}, max_failures=2, checkpoint_every=0)
    played = play(
        job,
        folder,
        [
            Act(lambda s: s.queue["failed"] == 1 and s.step >= 20, kill("pserver", 1)),
            Act(lambda s: s.generation == 2, lambda _: pace.set(0)),
        ],
        trainers=2,
        quiet=False,
    )
    failed = [e for e in played.statuses[-1].events if e.kind == "step-failed"]
    assert len(failed) == 2, "max_failures; later passes leave the chunk out from their beginning"
    assert all("record 100 is damaged" in e.text for e in failed)
    assert all("Traceback" in e.fields["traceback"] for e in failed)
    assert sum(played.result.failures.values()) == 2
    (poison,) = [e for e in played.statuses[-1].events if e.kind == "poison"]
    assert "chunk 2 of pass 0 is DISCARDED" in poison.text
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 11, "failed": 1}
    assert "1 chunks DISCARDED as poison" in capfd.readouterr().out

    order = record_order(job.config.seed, 0, 2, training.CHUNK).tolist()
    batch = order.index(BROKEN - 2 * training.CHUNK) // training.BATCH
    assert batch > 0, "part of the chunk is trained on"

    def left_out(step: int, work: Located) -> bool:
        return work.chunk == 2 and (work.pass_index > 0 or work.batch >= batch)

    eager = training.trained_in_one_process(job, training.network(), left_out)
    model = training.network()
    graphft.load_into(model, played.result.model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, eager[name], rtol=1e-3, atol=1e-4)


def test_a_computation_that_always_fails_ends_the_job_with_its_error(folder: Path, pace: Pace) -> None:
    """Discarding one chunk after the other is no progress."""
    launch = ["-m", "graphft", "launch", "--max-restarts", "2", "--trainers", "1"]
    options = {"blobs": {"mislabeled": 0}, "max_failures": 2}
    launcher = Program(folder, *launch, SCRIPT, pace.file, json.dumps(options))
    assert launcher.wait() == 1
    assert "error[job-failed]: job blobs failed: trainer 0 failed 3 times in a row" in launcher.output
    assert "Target 7 is out of bounds" in launcher.output
    assert "step 0 of slot 0 failed" in launcher.output
    assert not (folder / "jobs" / "blobs" / "model.safetensors").exists()
