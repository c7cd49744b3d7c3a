"""A record that ends the process that reads it: its batch is discarded, and the rest is trained."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from graphft import ir
from tests.integration import training
from tests.integration.plays import Pace, play

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_record_that_kills_its_reader(program: ir.Program, folder: Path, pace: Pace) -> None:
    pace.set(0)
    options = {"max_failures": 2, "max_discarded": 1.0, "epochs": 1, "dispatch": "coordinator", "sync": False}
    played = play(training.job(program, pace=pace.file, blobs={"fatal": 100}, **options), folder, trainers=2)
    events = played.statuses[-1].events
    (discarded,) = [e for e in events if e.kind == "discarded"]
    assert "of chunk 2 in pass 0 failed" in discarded.text
    assert signal.SIGSEGV.name in discarded.text
    failed = [e for e in events if e.kind == "step-failed"]
    assert len(failed) == 2
    assert all("died (killed by SIGSEGV)" in e.text and "of chunk 2 in pass 0" in e.text for e in failed)
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}
