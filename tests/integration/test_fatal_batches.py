"""A record that ends the process that reads it, in whatever way: its batch is discarded, and the rest is trained."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from graphft import ir
from tests.integration import training
from tests.integration.plays import Pace, play

pytestmark = pytest.mark.timeout(600)
FATAL = 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "deaths", "options"),
    [
        (signal.SIGSEGV, "killed by SIGSEGV", 2, {"max_failures": 2, "dispatch": "coordinator", "sync": False}),
        (signal.SIGKILL, "killed by SIGKILL", 3, {"max_failures": 1}),
    ],
    ids=["segv-coordinator-async", "kill"],
)
def test_a_record_that_kills_its_reader(
    program: ir.Program, folder: Path, pace: Pace, how: int, status: str, deaths: int, options: Mapping[str, Any]
) -> None:
    """It was started again without end, and without a word; after `exit` it was taken for a trainer that is done."""
    pace.set(0)
    job = training.job(
        program, pace=pace.file, blobs={"fatal": FATAL, "how": int(how)}, passes=1, max_discarded=1.0, **options
    )
    played = play(job, folder, trainers=2)
    events = played.statuses[-1].events
    (discarded,) = [e for e in events if e.kind == "discarded"]
    assert "of chunk 2 in pass 0 failed" in discarded.text
    failed = [e for e in events if e.kind == "step-failed"]
    assert len(failed) == options["max_failures"]
    assert all(f"died ({status})" in e.text and "of chunk 2 in pass 0" in e.text for e in failed)
    assert f"{status}" in discarded.text
    assert len([e for e in events if e.kind == "died"]) >= deaths
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}
