"""A record that ends the process that reads it, in whatever way: its batch is left out, and the rest is trained."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from graphft import ir
from graphft.plan import record_order
from graphft.runtime.process.role_process import EXIT_LEASE_LOST
from tests.integration import training
from tests.integration.plays import Pace, play

pytestmark = pytest.mark.timeout(600)
FATAL = 100


@pytest.mark.parametrize(
    ("how", "status", "deaths", "options"),
    [
        (signal.SIGSEGV, "killed by SIGSEGV", 2, {"max_failures": 2, "sync": False}),
        (signal.SIGSEGV, "killed by SIGSEGV", 2, {"max_failures": 2, "dispatch": "coordinator"}),
        (signal.SIGSEGV, "killed by SIGSEGV", 2, {"max_failures": 2, "dispatch": "coordinator", "sync": False}),
        (signal.SIGKILL, "killed by SIGKILL", 3, {"max_failures": 1}),
        (training.EXIT, "exit status 0, before the job was over", 1, {"max_failures": 1}),
        (-EXIT_LEASE_LOST, "lease or etcd lost", 1, {"max_failures": 1}),
    ],
    ids=["segv-async", "segv-coordinator", "segv-coordinator-async", "kill", "exit", "exit-as-if-preempted"],
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
    (left_out,) = [e for e in events if e.kind == "left-out"]
    assert "of chunk 2 in pass 0 failed" in left_out.text
    failed = [e for e in events if e.kind == "step-failed"]
    assert len(failed) == options["max_failures"]
    assert all(f"died ({status})" in e.text and "of chunk 2 in pass 0" in e.text for e in failed)
    assert f"{status}" in left_out.text
    assert len([e for e in events if e.kind == "died"]) >= deaths
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}


def test_a_record_of_the_batch_that_all_prove_themselves_with(program: ir.Program, folder: Path) -> None:
    """Each death counted against its trainer, so the job failed before the batch could be left out."""
    first = int(record_order(11, 0, 0, training.CHUNK)[0])
    job = training.job(
        program, blobs={"fatal": first, "how": int(signal.SIGSEGV)}, passes=1, max_failures=1, max_discarded=1.0
    )
    played = play(job, folder, trainers=2)
    events = played.statuses[-1].events
    proving = [e for e in events if e.kind == "died" and "while proving itself with batch 0 of chunk 0" in e.text]
    assert 3 <= len(proving) < 12, "three times both trainers, or one of them; a few more on a busy machine"
    assert "times in a row, trainers ended" in next(e.text for e in events if e.kind == "unproved")
    assert "batch 0 of chunk 0 in pass 0 failed" in next(e.text for e in events if e.kind == "left-out")
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}
