"""Stale gradients in jobs of real processes: bounded, compensated, and every batch exactly once all the same."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.launcher.supervisor import Supervisor
from tests.integration.plays import Act, Pace, Played, at, kill, play, send
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


@pytest.mark.parametrize("bound", [0, 1])
def test_nothing_staler_than_allowed_is_applied(program: ir.Program, folder: Path, pace: Pace, bound: int) -> None:
    """Three trainers at once, one of which stands still for a while: what it had begun is far behind when it goes on.

    What is refused is computed again, for the shards that lack it; somebody else's batch was applied for each refusal,
    so that the job ends even when nothing stale is applied at all.
    """
    played = play(
        async_job(program, pace=pace.file, max_staleness=bound, passes=2, lease_ttl=60),
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
    assert staleness(played) == [bound] * 2
    for role in ("pservers", "trainers"):
        assert counted(played, role, "refused-stale") > 10
    assert played.result.preemptions == {}


def test_a_shard_that_comes_back_compensates_again(program: ir.Program, folder: Path, pace: Pace) -> None:
    """It has no copies of what it sent before: gradients of these are applied as they are, and counted.

    It stops before it dies, so that trainers have gradients on the way to it.
    """
    stopped: list[float] = []

    def stop(supervisor: Supervisor) -> None:
        assert supervisor.signal("pserver", 1, signal.SIGSTOP)
        stopped.append(time.monotonic())

    played = play(
        async_job(program, pace=pace.file, mode="dc_asgd", dc_lambda=0.5, dc_decay=0.9, lease_ttl=60),
        folder,
        [
            Act(lambda s: at(30)(s) and (s.checkpoint or 0) >= 20, stop),
            Act(lambda s: time.monotonic() > stopped[0] + WAIT, kill("pserver", 1)),
            Act(lambda s: s.generation == 1 and at(80)(s), lambda _: pace.set(0)),
        ],
        trainers=3,
    )
    assert_exact(played)
    assert trained(played)
    assert "restarted" in played.events
    assert any(name.endswith("@mean_square") and bool((value > 0).any()) for name, value in played.state.items())
    uncompensated = counted(played, "pservers", "uncompensated")
    assert 1 <= uncompensated <= 6, "one or two of each trainer, behind the restart"
    assert min(staleness(played)) >= 1
