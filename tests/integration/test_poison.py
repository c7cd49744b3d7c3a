"""A bad record, and code that always fails, are reported at once, and never hang the job."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.coordination.result_files import read_discarded
from graphft.runtime.launcher.folder_status import look_at
from tests.integration import training
from tests.integration.plays import RUN, SCRIPT, Act, Pace, Program, assert_model, kill, play

pytestmark = pytest.mark.timeout(600)
BROKEN = 100


def test_a_record_that_cannot_be_read_is_discarded_and_the_rest_is_exact(
    program: ir.Program, folder: Path, pace: Pace, capfd: pytest.CaptureFixture[str]
) -> None:
    """After it is discarded a pserver dies, and everything is done again from the first step on: to the same end."""
    options = {"max_failures": 2, "checkpoint_every": 0}
    job = training.job(program, pace=pace.file, blobs={"broken": BROKEN}, **options)
    played = play(
        job,
        folder,
        [
            Act(lambda s: bool(s.discarded) and s.step >= 20, kill("pserver", 1)),
            Act(lambda s: s.generation >= 2, lambda _: pace.set(0)),
        ],
        trainers=2,
        quiet=False,
    )
    failed = [e for e in played.statuses[-1].events if e.kind == "step-failed"]
    assert len(failed) == 2, "max_failures; later passes leave its records out from their beginning"
    assert all("record 100 is damaged" in e.text for e in failed)
    assert all("Traceback" in e.fields["traceback"] for e in failed)
    assert sum(played.result.failures.values()) == 2
    (event,) = [e for e in played.statuses[-1].events if e.kind == "discarded"]
    assert "DISCARDED: batch" in event.text
    assert "of chunk 2 in pass 0 failed 2 times in a row" in event.text
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}

    (discarded,) = played.result.discarded
    plan = job.config.plan
    bad = frozenset({BROKEN - 2 * training.CHUNK})
    assert bad < set(plan.positions(0, 2, discarded.batch).tolist())
    assert discarded.records == (BROKEN,)
    assert "record 100 is damaged" in discarded.reason
    assert f"1 of {training.RECORDS} records were DISCARDED" in capfd.readouterr().err
    assert read_discarded(folder) == played.result.discarded, "also when its etcd has gone"
    assert "1 of 444 records were DISCARDED" in look_at(folder).describe()

    eager = training.trained_in_one_process(
        job, training.network(), lambda work: bad if work.chunk == 2 else frozenset()
    )
    assert_model(played.result.model, eager)


@pytest.mark.slow
def test_a_computation_that_always_fails_ends_the_job_with_its_error(folder: Path, pace: Pace) -> None:
    """The check, which finds it before anything starts, is off."""
    launch = ["-m", "graphft", "launch", "--max-restarts", "2", "--trainers", "1"]
    options = {"blobs": {"mislabeled": 0}, "max_failures": 2, "max_discarded": 1.0, "check": False}
    launcher = Program(folder, *launch, SCRIPT, pace.file, json.dumps(options))
    assert launcher.wait() == 1
    assert "error[job-failed]: job blobs failed: trainer 0 failed 3 times in a row" in launcher.output
    assert "Target 7 is out of bounds" in launcher.output
    assert "step 0 of slot 0 failed" in launcher.output
    assert not (folder / RUN / "model.safetensors").exists()


@pytest.mark.slow
def test_a_record_that_kills_its_reader(program: ir.Program, folder: Path) -> None:
    options = {"max_failures": 2, "max_discarded": 1.0, "epochs": 1, "dispatch": "coordinator", "sync": False}
    played = play(training.job(program, blobs={"fatal": BROKEN}, **options), folder, trainers=2)
    events = played.statuses[-1].events
    (discarded,) = [e for e in events if e.kind == "discarded"]
    assert "of chunk 2 in pass 0 failed" in discarded.text
    assert signal.SIGSEGV.name in discarded.text
    failed = [e for e in events if e.kind == "step-failed"]
    assert len(failed) == 2
    assert all("died (killed by SIGSEGV)" in e.text and "of chunk 2 in pass 0" in e.text for e in failed)
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}
