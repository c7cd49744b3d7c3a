"""A run that goes on with another number of pservers, and is killed on the way: the bits of an undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from graphft.runtime.coordination.status import JobStatus
from graphft.transpiler import Job
from tests.integration.plays import SCRIPT, Pace, Played, Program, assert_same_bits, at, kill_first, whole_state

pytestmark = pytest.mark.timeout(600)


def saved(step: int) -> Callable[[JobStatus], bool]:
    """At `step` or beyond, with a checkpoint that is committed."""
    return lambda status: at(step)(status) and (status.checkpoint or 0) > 0


def test_two_three_one(folder: Path, pace: Pace, undisturbed: Played) -> None:
    def run(pservers: int) -> Program:
        options = json.dumps({"pservers": pservers})
        return Program(folder, SCRIPT, pace.file, options, GRAPHFT_LAUNCH='{"quiet": true}')

    runs = folder / "jobs" / "blobs" / "runs"
    first = run(2)
    first.until(runs / "1", saved(22))
    pace.set(5.0)
    early = run(3)
    assert early.wait() != 0, "the first run is at work: both would go on"
    assert "the job in jobs/blobs/runs/1 is being run by pid" in early.output, early.output
    assert not (runs / "2").exists()
    first.kill()
    pace.set(0.05)
    second = run(3)
    second.until(runs / "2", lambda s: at(30)(s) and kill_first(s.pservers))
    second.until(runs / "2", lambda s: at(45)(s) and any(e.kind == "died" for e in s.events))
    second.kill()
    pace.set(0)
    third = run(1)
    assert third.wait() == 0, third.output
    for program, number in ((second, 3), (third, 1)):
        assert "; going on from step " in program.output, program.output
        assert f", {number} pserver" in program.output, program.output
    done = runs / "3"
    assert (done / "model.safetensors").read_bytes() == (undisturbed.folder / "model.safetensors").read_bytes()
    assert_same_bits(whole_state(Job.load(done), done), undisturbed.state)
