"""Processes on Ray, one by one: where they run, how they end, and what is left of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphft.runtime.engines.base import EngineError, Order, Process, Run
from graphft.runtime.engines.ray import Ray
from graphft.runtime.process.role_process import role_environment
from tests.engines.conformance import SILENT, check
from tests.engines.ray_nodes import Nodes
from tests.support.waiting import until

ray: Any = pytest.importorskip("ray", reason="ray is not installed: make ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 120.0


@pytest.fixture
def engine(nodes: Nodes, job_dir: Path) -> Iterator[Any]:
    engine = Ray(nodes.address).open(Run(job_dir, str(job_dir), role_environment()))
    yield engine
    engine.close()


def trainer(index: int) -> Order:
    return Order("trainer", index, SILENT)


def made(process: Process) -> Process:
    until(lambda: process.pid or process.poll() is not None, SECONDS)
    assert process.poll() is None
    return process


def test_it_keeps_the_contract_of_engines(nodes: Nodes, job_dir: Path) -> None:
    check(Ray(nodes.address).open(Run(job_dir, str(job_dir), role_environment(), {"pserver": {"CPU": 0.5}})))


def demands(nodes: Nodes) -> list[tuple[dict[str, float], int]]:
    """Returns what an autoscaler is told: what has no room, and how often."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    demanded = get_cluster_status(nodes.address).resource_demands.ray_task_actor_demand
    return [(dict(b.bundle), b.count) for demand in demanded for b in demand.bundles_by_count]


def test_what_has_no_room_waits_and_can_be_taken_back(engine: Any, nodes: Nodes) -> None:
    """The node has one CPU."""
    first, second, third = engine.start(trainer(0)), engine.start(trainer(1)), engine.start(trainer(2))
    made(first)
    assert second.place == third.place == "waiting for {CPU: 1}"
    assert [listed.pid > 0 for listed in engine.list()] == [True, False, False]
    until(lambda: demands(nodes) == [({"CPU": 1.0}, 2)], SECONDS)
    second.send_signal(signal.SIGTERM)
    assert second.wait(SECONDS) == -signal.SIGTERM
    assert second.pid == 0
    first.send_signal(signal.SIGKILL)
    made(third)
    engine.cancel_orders()
    assert third.poll() is None
    with pytest.raises(EngineError):
        engine.start(trainer(3))


def test_it_ends_with_its_actor_and_that_is_sigkill(engine: Any) -> None:
    process = made(engine.start(trainer(0)))
    with open(f"/proc/{process.pid}/stat") as file:
        actor = int(file.read().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    assert process.wait(SECONDS) == -signal.SIGKILL
    until(lambda: process.identity.dead)
