"""How many processes a launcher starts: what can never work is refused at once, what is missing is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher import observers
from graphft.runtime.launcher.observers import AGAIN_SECONDS, FIRST_SECONDS, MissingProcesses
from graphft.runtime.launcher.options import Counts, LaunchOptions, check_counts
from graphft.transpiler import Job


@pytest.mark.parametrize(
    ("trainers", "pservers", "message"),
    [
        (0, 2, "trainers is 0, and this launcher brings its own etcd"),
        (2, 1, "pservers is 1, and this launcher brings its own etcd: the job would wait for ever"),
        (2, 0, "pservers is 0, and this launcher"),
        (2, 3, "pservers is 3, but the job has 2"),
    ],
)
def test_what_can_never_work_is_an_error(job: Job, trainers: int, pservers: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_counts(job.config, Counts(trainers, pservers), embedded=True)


def test_a_shared_etcd_lets_others_bring_what_is_missing(job: Job) -> None:
    for trainers, pservers in ((0, 2), (2, 1), (2, 0), (5, 2)):
        check_counts(job.config, Counts(trainers, pservers), embedded=False)
    check_counts(job.config, Counts(1, 2), embedded=True)
    with pytest.raises(UsageError, match="pservers is 3, but the job has 2"):
        check_counts(job.config, Counts(2, 3), embedded=False)


def test_as_many_coordinators_as_the_job_can_use(job: Job, coordinated: Job) -> None:
    assert LaunchOptions().counts(job.config) == Counts(2, 2, 0)
    assert LaunchOptions().counts(coordinated.config) == Counts(2, 2, 1)
    asked = LaunchOptions(trainers=1, coordinators=2).counts(coordinated.config)
    assert list(asked.processes()) == [
        ("coordinator", 0),
        ("coordinator", 1),
        ("pserver", 0),
        ("pserver", 1),
        ("trainer", 0),
    ]
    check_counts(coordinated.config, asked, embedded=True)
    check_counts(coordinated.config, Counts(2, 2, 0), embedded=False)
    with pytest.raises(UsageError, match="coordinators is 0, and this launcher brings its own etcd"):
        check_counts(coordinated.config, Counts(2, 2, 0), embedded=True)
    for embedded in (True, False):
        with pytest.raises(UsageError, match=r"coordinators is 1, but the job's trainers claim .* in etcd") as no:
            check_counts(job.config, Counts(2, 2, 1), embedded=embedded)
        assert 'dispatch="coordinator"' in no.value.help
    with pytest.raises(GraphftError, match="coordinators is -1, expected 0 or more"):
        LaunchOptions(coordinators=-1)


def status(**changes: Any) -> JobStatus:
    return dataclasses.replace(JobStatus("j", "running", {"pservers": 2}, 0, 0, 0, None), **changes)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(observers, "tell", lines.append)
    return lines


def test_what_is_missing_is_told_again_and_again(told: list[str]) -> None:
    now = [0.0]
    missing = MissingProcesses(Path("jobs/x"), "h:1", Counts(0, 1), lambda: now[0])
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


@pytest.mark.parametrize(
    ("own", "there", "dispatch", "missing"),
    [
        (0, {}, "coordinator", True),
        (0, {"0-a": {"serving": False}}, "coordinator", False),
        (1, {}, "coordinator", False),
        (0, {}, "etcd", False),
    ],
    ids=["nowhere", "elsewhere", "here", "not needed"],
)
def test_a_coordinator_that_is_missing_is_told(
    told: list[str], own: int, there: dict[str, Any], dispatch: str, missing: bool
) -> None:
    now = [0.0]
    look = MissingProcesses(Path("jobs/x"), "h:1", Counts(1, 2, own), lambda: now[0])
    now[0] = 100.0
    look.look(status(spec={"pservers": 2, "dispatch": dispatch}, coordinators=there))
    assert [t.startswith("waiting for a coordinator, which this launcher does not start") for t in told] == [
        True
    ] * missing


def test_own_processes_that_are_late_are_not_missing(told: list[str]) -> None:
    now = [0.0]
    missing = MissingProcesses(Path("jobs/x"), "h:1", Counts(1, 2), lambda: now[0])
    now[0] = 100.0
    missing.look(status())
    assert told == []
