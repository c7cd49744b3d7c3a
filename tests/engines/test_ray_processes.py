"""Processes on Ray, one by one: where they run, how they end, and what is left of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from graphft.errors import UsageError
from graphft.runtime.engines.base import EngineError, Order, Process, Run
from graphft.runtime.engines.ray import Ray
from graphft.runtime.etcd import Etcd
from graphft.runtime.process.identity import identify
from graphft.runtime.process.role_environment import role_environment
from tests.engines.conformance import check
from tests.engines.ray_nodes import Nodes, nodes_of_ray
from tests.integration import training
from tests.support.waiting import until

ray: Any = pytest.importorskip("ray", reason="ray is not installed: make ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOWHERE = "127.0.0.1:1"
"""An etcd that does not answer: a role waits a minute for it."""
SECONDS = 120.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with nodes_of_ray(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job") / "blobs"
    training.job(training.program()).save(folder)
    return folder


@pytest.fixture
def engine(nodes: Nodes, job: Path) -> Iterator[Any]:
    engine = Ray(nodes.address).open(Run(job, str(job), role_environment()))
    yield engine
    engine.close()


def trainer(index: int) -> Order:
    return Order("trainer", index, NOWHERE)


def made(process: Process) -> Process:
    until(lambda: process.pid or process.poll() is not None, SECONDS)
    assert process.poll() is None
    return process


def test_it_keeps_the_contract_of_engines(nodes: Nodes, job: Path) -> None:
    half = {"pserver": {"CPU": 0.5}}
    check(Ray(nodes.address, resources=half).open(Run(job, str(job), role_environment())))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(engine: Any, signum: int) -> None:
    process = made(engine.start(trainer(0)))
    assert process.await_made() == process.identity
    assert process.place.startswith("node ")
    assert [(listed.role, listed.state) for listed in engine.list()] == [("trainer", "running")]
    until(lambda: any("etcd did not answer" in line for line in engine.logs(trainer(0), 20)), SECONDS)
    process.send_signal(signum)
    assert process.wait(SECONDS) == process.poll() == -signum
    until(lambda: process.identity.dead)
    assert engine.list() == []


def demands(nodes: Nodes) -> list[tuple[dict[str, float], int]]:
    """What an autoscaler is told: what has no room, and how often."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    demanded = get_cluster_status(nodes.address).resource_demands.ray_task_actor_demand
    return [(dict(b.bundle), b.count) for demand in demanded for b in demand.bundles_by_count]


def test_what_has_no_room_waits_and_can_be_taken_back(engine: Any, nodes: Nodes) -> None:
    """The node has one CPU."""
    first, second, third = engine.start(trainer(0)), engine.start(trainer(1)), engine.start(trainer(2))
    made(first)
    assert second.place == third.place == "waiting for {CPU: 1}"
    assert [listed.state for listed in engine.list()] == ["running", "waiting", "waiting"]
    until(lambda: demands(nodes) == [({"CPU": 1.0}, 2)], SECONDS)
    second.send_signal(signal.SIGTERM)
    assert second.wait(SECONDS) == -signal.SIGTERM
    assert second.pid == 0
    first.send_signal(signal.SIGKILL)
    made(third)
    engine.cancel_orders()
    assert third.poll() is None
    with pytest.raises(EngineError, match="is being closed"):
        engine.start(trainer(3))


def test_who_waits_for_room_that_others_have(nodes: Nodes, job: Path) -> None:
    """One CPU is there. A process that takes its time has none of its own to wait for."""
    half = {"pserver": {"CPU": 0.5}}
    engine = Ray(nodes.address, resources=half).open(Run(job, str(job), role_environment()))
    try:
        first = engine.start(trainer(0))
        shard = engine.start(Order("pserver", 0, NOWHERE))
        made(first)
        until(lambda: engine.lacks_room(shard), SECONDS)
        assert not engine.lacks_room(first)
        first.send_signal(signal.SIGKILL)
        made(shard)
        assert not engine.lacks_room(shard)
    finally:
        engine.close()


def test_what_no_node_could_take_is_told_until_one_joins(
    nodes: Nodes, job: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node has 2 CPUs, the head one."""
    wants = {"trainer": {"CPU": 2}}
    engine = Ray(nodes.address, resources=wants).open(Run(job, str(job), role_environment()))
    try:
        process = engine.start(trainer(0))
        lacks = "no node of this Ray has CPU: 2, the largest has CPU: 1"

        def told() -> bool:
            engine.step()
            return process.place == f"waiting for {{CPU: 2}}: {lacks}"

        until(told, SECONDS)
        engine.start(trainer(1))
        engine.step()
        assert [line for line in caplog.messages if lacks in line] == [
            f"trainer 0 has no room: {lacks}. It waits until a node joins that has it"
        ]
        there = f"node {nodes.add().node_id[:8]}"  # whose CPUs one of the two gets

        def placed() -> bool:
            engine.step()
            return sorted(listed.place for listed in engine.list()) == [there, "waiting for {CPU: 2}"]

        until(placed, SECONDS)
    finally:
        engine.close()
        nodes.set(0)


def test_its_exit_status_and_its_last_words_are_told(engine: Any, job: Path, tmp_path: Path) -> None:
    engine.run = Run(job, str(tmp_path / "no-job"), role_environment())
    assert engine.start(trainer(7)).wait(SECONDS) == 2
    assert "no-job" in "\n".join(engine.logs(trainer(7), 5))
    assert engine.run.log(trainer(7)).read_text().splitlines()[-5:] == engine.logs(trainer(7), 5)


def test_it_ends_with_its_actor_and_that_is_sigkill(engine: Any) -> None:
    process = made(engine.start(trainer(0)))
    with open(f"/proc/{process.pid}/stat") as file:
        actor = int(file.read().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    assert process.wait(SECONDS) == -signal.SIGKILL
    until(lambda: process.identity.dead)


def test_an_actor_that_cannot_be_made_is_told_and_tried_again_later(engine: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    engine._folder, folder = str(file / "below"), engine._folder
    process = engine.start(trainer(0))
    assert process.wait(SECONDS) == 1
    with pytest.raises(EngineError, match=r"Ray cannot make its actor: .*below"):
        engine.start(trainer(0))
    engine._folder = folder
    made(engine.start(trainer(0)))


def test_close_ends_everything(nodes: Nodes, job: Path) -> None:
    engine = Ray(nodes.address).open(Run(job, str(job), role_environment()))
    endpoints = engine.provide_etcd()
    assert endpoints.count(":") == 1  # one node, one member
    process = made(engine.start(trainer(0)))
    waiting = engine.start(trainer(1))
    engine.close()
    assert (process.poll(), waiting.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
    until(lambda: process.identity.dead)
    assert not ray.is_initialized()


def test_a_member_of_etcd_that_dies_is_started_again_with_its_data(engine: Any) -> None:
    """By Ray: first its process is killed, then its actor."""
    endpoints = engine.provide_etcd()
    with Etcd([endpoints]) as etcd:
        etcd.put("key", b"value")
        for parents in (0, 1):
            process = next(p for p in psutil.process_iter() if f"--listen-client-urls=http://{endpoints}" in cmdline(p))
            victim, server = process.parent() if parents else process, identify(process.pid)
            assert victim is not None
            victim.kill()
            until(lambda server=server: server.dead, SECONDS)
            kv = etcd.get("key", deadline=SECONDS)
            assert kv is not None
            assert kv.value == b"value"
    assert engine.provide_etcd() == endpoints


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="etcd_members is 2"):
        Ray(etcd_members=2)
    with pytest.raises(UsageError, match="resources names worker"):
        Ray(resources={"worker": {"CPU": 1}})
