"""Checkpoints that are taken because the newest one is old: at one step of all shards, and on over recoveries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.supervisor import Supervisor
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, at, kill, play

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]


def saved(status: JobStatus) -> int:
    """The step of the newest committed checkpoint; 0 before the first."""
    return status.checkpoint or 0


def test_sync_checkpoints_go_by_age(program: ir.Program, folder: Path, pace: Pace, undisturbed: Played) -> None:
    """None goes by the number of steps here, so whatever a restarted shard finds was asked for.

    Each is asked for about a second ahead: the job must take longer than a few of them.
    """
    pace.set(0.15)
    job = training.job(
        program, pace=pace.file, checkpoint_every=0, checkpoint_seconds=0.5, recovery_timeout=120, lease_ttl=60
    )
    before: list[int] = []
    newest: list[int] = []

    def later(status: JobStatus) -> bool:
        return at(saved(status) + 1)(status) and saved(status) > max(before, default=0)

    def due(status: JobStatus) -> bool:
        newest.append(saved(status))
        return later(status) and status.generation == len(before)

    def kill_noted(*indices: int) -> Callable[[Supervisor], bool]:
        def do(supervisor: Supervisor) -> bool:
            done = kill("pserver", *indices)(supervisor)
            before.extend(newest[-1:] if done else [])
            return done

        return do

    played = play(
        job,
        folder,
        [
            Act(due, kill_noted(1)),
            Act(due, kill_noted(0, 1)),
            Act(lambda s: s.generation >= 2 and later(s), lambda _: pace.set(0)),
        ],
    )
    assert_same_bits(played.state, undisturbed.state)
    restarted = [event.fields["step"] for event in played.statuses[-1].events if event.kind == "restarted"]
    assert len(restarted) == 3
    assert all(step >= before[0] > 0 for step in restarted), "each goes on from a checkpoint"


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
