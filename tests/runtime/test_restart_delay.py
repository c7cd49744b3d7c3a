"""When a process is started again, and as what its end counts: with stand-ins for roles."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import child
from graphft.runtime.process.work_record import Phase
from tests.runtime.stubs import Stubs, steps, texts

REPORT = """
import sys
from pathlib import Path
from graphft.runtime.process.work_record import Phase, Place, WorkRecord, record_path
record = WorkRecord(record_path(Path(sys.argv[1]), 0))
record.begin(Phase.READING, Place(0, 0, 0), claim=7)
record.mark(Phase(int(sys.argv[2])))
record.end()
sys.exit(1)
"""


@pytest.mark.parametrize(("phase", "delays"), [("REPORTED", ["", ""]), ("COMPUTING", ["", " in 1 s"])])
def test_a_failure_that_the_queue_counts_does_not_make_the_next_start_later(
    supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch, etcd: Etcd, keys: Keys, phase: str, delays: list[str]
) -> None:
    monkeypatch.setattr(child, "BACKOFF_SECONDS", 0.6)
    supervisor = supervise(max_restarts=2)
    stubs.code, stubs.arguments = REPORT, [str(supervisor.job_dir), str(int(Phase[phase]))]
    supervisor.add("trainer", 0)
    steps(supervisor, lambda: supervisor.failed)
    assert texts(etcd, keys)[:2] == [f"trainer 0 died (exit status 1), starting it again{delay}" for delay in delays]
    assert "trainer 0 failed 3 times in a row" in supervisor.failed, "no step came about in between"


def test_a_coordinator_that_was_asked_to_leave_is_started_again_at_once(supervise: Any, stubs: Stubs) -> None:
    stubs.code = ""
    supervisor = supervise(max_restarts=0)
    child = supervisor.add("coordinator", 0)
    steps(supervisor, lambda: len(stubs.started) == 2)
    assert (child.failures, child.preemptions, supervisor.failed) == (0, 1, "")
