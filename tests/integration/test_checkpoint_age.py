"""Checkpoints that are taken because the newest one is old: at one step of all shards, and on over recoveries."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.coordination.status import JobStatus
from tests.integration import training
from tests.integration.plays import Act, Pace, at, kill, play

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]


def saved(status: JobStatus) -> int:
    """The step of the newest committed checkpoint; 0 before the first."""
    return status.checkpoint or 0


def test_async_shards_take_theirs_by_age(program: ir.Program, folder: Path, pace: Pace) -> None:
    options = {"sync": False, "trainers": 2, "checkpoint_every": 0, "checkpoint_seconds": 0.5, "lease_ttl": 60}
    job = training.job(program, pace=pace.file, **options)
    played = play(
        job,
        folder,
        [
            Act(lambda s: at(10)(s) and saved(s) > 0, kill("pserver", 0)),
            Act(lambda s: s.generation >= 1 and len(s.pservers) == 2, lambda _: pace.set(0)),
        ],
    )
    (restarted,) = [event for event in played.statuses[-1].events if event.kind == "restarted"]
    assert restarted.fields["step"] > 0
