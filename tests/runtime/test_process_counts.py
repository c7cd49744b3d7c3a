"""How many processes a launcher starts: what can never work is refused at once, what is missing is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from graphft.errors import UsageError
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.process_counts import AGAIN_SECONDS, FIRST_SECONDS, MissingProcesses, check_counts
from graphft.transpiler import Job


@pytest.mark.parametrize(
    ("trainers", "pservers", "message"),
    [
        (0, 2, "trainers is 0, and this launcher brings its own etcd"),
        (2, 1, "pservers is 1, but the job has 2, and this launcher brings its own etcd: it would wait for ever"),
        (2, 0, "pservers is 0, but the job has 2"),
        (2, 3, "pservers is 3, but the job has 2"),
    ],
)
def test_what_can_never_work_is_an_error(job: Job, trainers: int, pservers: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_counts(job.config, trainers, pservers, embedded=True)


def test_a_shared_etcd_lets_others_bring_what_is_missing(job: Job) -> None:
    for trainers, pservers in ((0, 2), (2, 1), (2, 0), (5, 2)):
        check_counts(job.config, trainers, pservers, embedded=False)
    check_counts(job.config, 1, 2, embedded=True)
    with pytest.raises(UsageError, match="pservers is 3, but the job has 2"):
        check_counts(job.config, 2, 3, embedded=False)


def status(**changes: Any) -> JobStatus:
    return dataclasses.replace(JobStatus("j", "running", {"pservers": 2}, 0, 0, 0, None), **changes)


def test_what_is_missing_is_told_again_and_again() -> None:
    now, told = [0.0], list[str]()
    missing = MissingProcesses(Path("jobs/x"), "h:1", 0, 1, told.append, lambda: now[0])
    alone = status(pservers={0: {}})
    missing.look(alone)
    assert told == [], "processes elsewhere take a moment to start, too"
    for at in (FIRST_SECONDS, FIRST_SECONDS + 1, FIRST_SECONDS + AGAIN_SECONDS):
        now[0] = at
        missing.look(alone)
    line = "waiting for pserver 1 and a trainer, which this launcher does not start"
    assert told == [f"{line} (elsewhere: graphft start ROLE --job jobs/x --etcd h:1)"] * 2
    now[0] += AGAIN_SECONDS
    missing.look(status(pservers={0: {}, 1: {}}, loading={"t": {}}))
    missing.look(status(state="complete"))
    assert len(told) == 2
    missing.look(alone)
    assert len(told) == 2, "it was there a moment ago"
    now[0] += FIRST_SECONDS
    missing.look(alone)
    assert len(told) == 3


def test_own_processes_that_are_late_are_not_missing() -> None:
    now, told = [0.0], list[str]()
    missing = MissingProcesses(Path("jobs/x"), "h:1", 1, 2, told.append, lambda: now[0])
    now[0] = 100.0
    missing.look(status())
    assert told == []
