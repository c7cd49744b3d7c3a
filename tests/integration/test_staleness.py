"""Stale gradients in jobs of real processes: bounded, compensated, and every batch exactly once all the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from graphft import ir
from tests.integration.plays import Act, Pace, Played, at, play, send
from tests.integration.test_async import assert_exact, async_job, trained

pytestmark = pytest.mark.timeout(600)

WAIT = 8.0
"""Seconds in which trainers push, and wait for an answer that does not come: a batch may take two, unless one looks."""


def counted(played: Played, role: str, name: str) -> int:
    """The most that was seen of a counter, summed over the processes of a role."""
    most: dict[str, int] = {}
    for status in played.statuses:
        for process in getattr(status, role).values():
            most[process["id"]] = max(most.get(process["id"], 0), process.get("counters", {}).get(name, 0))
    return sum(most.values())


def staleness(played: Played) -> list[int]:
    """The greatest that each shard tells of, when it has applied all."""
    return [e.fields["staleness_max"] for e in played.statuses[-1].events if e.kind == "applied"]


def test_nothing_staler_than_allowed_is_applied(program: ir.Program, folder: Path, pace: Pace) -> None:
    """Three trainers at once, one of which stands still for a while: what it had begun is far behind when it goes on.

    What is refused is computed again, for the shards that lack it; somebody else's batch was applied for each refusal,
    so that the job ends even when nothing stale is applied at all.
    """
    played = play(
        async_job(program, pace=pace.file, max_staleness=1, passes=2, lease_ttl=60),
        folder,
        [
            Act(lambda s: at(10)(s) and len(s.trainers) == 3, send(signal.SIGSTOP, "trainer", 0)),
            Act(at(30), send(signal.SIGCONT, "trainer", 0)),
            Act(at(50), lambda _: pace.set(0)),
        ],
        trainers=3,
    )
    assert_exact(played)
    assert trained(played)
    assert staleness(played) == [1, 1]
    for role in ("pservers", "trainers"):
        assert counted(played, role, "refused-stale") > 10
    assert played.result.preemptions == {}
