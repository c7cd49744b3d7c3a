"""Numbers of processes that can never work are refused at once; missing ones are told."""

from __future__ import annotations

import pytest

from graphft.errors import GraphftError, UsageError
from graphft.runtime.launcher.options import Counts, LaunchOptions, check_counts
from graphft.transpiler.job import Job


def test_what_can_never_work_is_an_error(job: Job) -> None:
    for counts, message in ((Counts(0, 2), "trainers is 0"), (Counts(2, 1), "pservers is 1")):
        expected = f"{message}, and this launcher brings its own etcd: the job would wait for ever"
        with pytest.raises(UsageError, match=expected):
            check_counts(job.config, counts, embedded=True)


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
    assert [*asked.processes()] == [*((kind, i) for kind in ("coordinator", "pserver") for i in (0, 1)), ("trainer", 0)]
    check_counts(coordinated.config, asked, embedded=True)
    check_counts(coordinated.config, Counts(2, 2, 0), embedded=False)
    with pytest.raises(UsageError, match="coordinators is 0, and this launcher brings its own etcd"):
        check_counts(coordinated.config, Counts(2, 2, 0), embedded=True)
    for embedded in (True, False):
        with pytest.raises(UsageError, match=r"coordinators is 1, but the job's trainers claim .* in etcd") as no:
            check_counts(job.config, Counts(2, 2, 1), embedded=embedded)
        assert 'dispatch="coordinator"' in no.value.help
    assert LaunchOptions(trainers=0, pservers=1, coordinators=0).missing(coordinated.config) == (
        "trainers and 1 pservers and coordinators"
    )
    assert LaunchOptions().missing(coordinated.config) == ""
    with pytest.raises(GraphftError, match="coordinators is -1, expected 0 or more"):
        LaunchOptions(coordinators=-1)
