"""Jobs whose tasks a coordinator gives out: two of them in one launcher, and one that somebody else starts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import EtcdError
from graphft.runtime.launcher.supervisor import Supervisor
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, at, kill, play

pytestmark = pytest.mark.timeout(600)


def serving(status: JobStatus) -> list[str]:
    return [name for name, coordinator in status.coordinators.items() if coordinator["serving"]]


def test_one_serves_the_other_takes_over_and_the_bits_are_those_of_any_dispatch(
    program: ir.Program, folder: Path, pace: Pace, undisturbed: Played
) -> None:
    killed: list[str] = []

    def kill_the_one_that_serves(supervisor: Supervisor) -> bool:
        found = None
        with contextlib.suppress(EtcdError):
            found = supervisor.view.coordinator
        if found is None or not kill("coordinator", int(found.id.partition("-")[0]))(supervisor):
            return False
        killed.append(found.id)
        return True

    def both(status: JobStatus) -> bool:
        return at(10)(status) and len(status.coordinators) == 2 and bool(serving(status))

    def another(status: JobStatus) -> bool:
        return both(status) and serving(status) != killed

    job = training.job(program, pace=pace.file, dispatch="coordinator", lease_ttl=60)
    acts = [Act(both, kill_the_one_that_serves), Act(another, lambda supervisor: pace.set(0))]
    played = play(job, folder, acts, coordinators=2)
    assert_same_bits(played.state, undisturbed.state)
    assert played.result.preemptions == {f"coordinator {killed[0].partition('-')[0]}": 1}
    assert played.result.failures == {}
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}
    told = [e.text.split()[-3:] for e in played.statuses[-1].events if e.kind == "coordinator"]
    assert told[:2] == [["gives", "out", "tasks"]] * 2, "on a busy machine others may follow"
