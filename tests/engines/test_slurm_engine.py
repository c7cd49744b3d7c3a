"""The engine alone, on a real Slurm: processes that begin, wait for room, are signalled, lost and refused."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from graphft.runtime.engines.base import Order, Run
from graphft.runtime.engines.slurm import SlurmEngine, SlurmStep
from graphft.runtime.etcd.embedded import free_ports
from graphft.runtime.process.identity import UNKNOWN
from tests.engines.conformance import check
from tests.integration.plays import ROOT
from tests.support.slurm_cluster import CPUS, DISCARDED, GPUS, SlurmCluster
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(DISCARDED), reason=f"no real Slurm: {DISCARDED}"), pytest.mark.timeout(900)]
PATIENCE = 300.0
WAITING = "waiting for a node"
Opened = Callable[..., SlurmEngine]


@pytest.fixture
def opened(cluster: SlurmCluster, job_dir: Path) -> Iterator[Opened]:
    """Opens engines in an allocation of both nodes, whatever happens to one."""
    task = ["--ntasks-per-node=2", f"--gpus-per-node={GPUS}", "--cpus-per-task=2"]
    number = cluster.call(
        "sbatch", "--parsable", "--no-kill", "--nodes=2", *task, "--output=/dev/null", "--wrap=sleep 999"
    )
    until(lambda: cluster.job_state(number) == "RUNNING", PATIENCE)
    environ = {
        **cluster.environment,
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NODELIST": cluster.job_field(number, "NodeList"),
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_PER_NODE": str(GPUS),
        "SLURM_NTASKS": "4",  # of the whole job: no step of ours is to take it for its own
    }
    engines = []

    def open_engine(resources: Mapping[str, float] | None = None) -> SlurmEngine:
        run = Run(job_dir, str(job_dir), {"PYTHONPATH": str(ROOT)}, {"trainer": resources or {}})
        engines.append(SlurmEngine(run, environ))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()
    cluster.call("scancel", number)
    until(lambda: not cluster.call("squeue", "--noheader"), PATIENCE)


def trainer(index: int = 0) -> Order:
    """A role that waits for an etcd which does not answer."""
    return Order("trainer", index, f"127.0.0.1:{free_ports(1)[0]}")


def gpus_of(step: SlurmStep) -> str:
    step.await_made()
    return psutil.Process(step.pid).environ().get("CUDA_VISIBLE_DEVICES", "")


def test_what_holds_for_every_engine(opened: Opened) -> None:
    check(opened())


def test_signals_reach_the_role(opened: Opened) -> None:
    engine = opened()
    step = engine.start(trainer())
    log = engine.run.log(step.order)
    before = log.read_text()
    until(lambda: "not answer" in log.read_text()[len(before) :], PATIENCE)
    step.send_signal(signal.SIGUSR1)
    until(lambda: "most recent call first" in log.read_text()[len(before) :], PATIENCE)
    with pytest.raises(subprocess.TimeoutExpired):
        step.wait(0.01)
    step.send_signal(signal.SIGTERM)
    assert step.wait(PATIENCE) == -signal.SIGTERM  # it has no handler yet


def test_without_room_it_waits(opened: Opened) -> None:
    engine = opened({"CPU": CPUS})
    first, second = (engine.start(trainer()) for _ in range(2))
    assert {first.await_made(), second.await_made()} - {UNKNOWN} == {first.identity, second.identity}
    third, fourth = (engine.start(trainer(1)) for _ in range(2))
    assert (third.pid, third.place, third.identity) == (0, WAITING, UNKNOWN)
    assert [each.pid > 0 for each in engine.list()] == [True, True, False, False]
    third.send_signal(signal.SIGTERM)
    third.wait(PATIENCE)
    assert third.await_made() == UNKNOWN
    assert not third.refused
    first.send_signal(signal.SIGKILL)
    assert fourth.await_made().pid == fourth.pid > 0


def test_each_trainer_of_an_allocation_has_its_gpus(opened: Opened) -> None:
    engine = opened()
    steps = [engine.start(trainer(index)) for index in range(4)]
    pserver = engine.start(Order("pserver", 0, trainer().etcd))
    assert gpus_of(pserver) == ""  # and it waits for nothing
    assert sorted((step.await_made() and step.place, gpus_of(step)) for step in steps) == [
        (node, gpu) for node in ("n1", "n2") for gpu in ("0", "1")
    ]
    assert engine.start(trainer(4)).place == WAITING
    assert engine.host == "127.0.0.1"


def test_a_lost_node_is_a_kill(opened: Opened, cluster: SlurmCluster) -> None:
    """srun ends with status 0 then."""
    engine = opened()
    steps = [engine.start(trainer(index)) for index in range(4)]
    for step in steps:
        step.await_made()
    cluster.kill_node("n2")
    lost = [step for step in steps if step.place == "n2"]
    assert [step.wait(PATIENCE) for step in lost] == [-signal.SIGKILL] * 2
    cluster.start_node("n2")
    until(lambda: "n2" in cluster.in_state("idle"), PATIENCE)
