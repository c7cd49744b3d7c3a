"""Every way to start a job: by hand with any etcd, the script as one role, torchrun; and without fault tolerance."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.etcd import EtcdError
from tests.integration import training
from tests.integration.plays import SCRIPT, Pace, Program, at, await_gone
from tests.support.etcd_servers import EmbeddedCluster
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
SMALL = {"trainers": 2, "pservers": 1, "epochs": 1}


@pytest.fixture(scope="module")
def plain() -> graphft.Program:
    return training.program(plain=True)


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    model = training.network(plain=True)
    graphft.load_into(model, folder / "model.safetensors")
    return model.state_dict()


@pytest.mark.slow
def test_by_hand_with_a_cluster_whose_leader_dies(plain: graphft.Program, folder: Path, pace: Pace) -> None:
    """Roles in any order, pservers without an index; an etcd of our own, with three members."""
    job = training.job(plain, pace=pace.file, trainers=2, epochs=2, lease_ttl=60)  # fewer steps than the schedule has
    job.save(folder / "job")

    def kill_leader() -> bool:
        with contextlib.suppress(EtcdError):  # an election is under way
            cluster.leader().kill()
            return True
        return False

    with EmbeddedCluster(folder / "cluster", heartbeat=200, election=2000) as cluster:
        start = ["-m", "graphft", "start", "--job", folder / "job", "--etcd", ",".join(cluster.endpoints)]
        roles = [Program(folder, *start, role) for role in ("trainer", "pserver", "coordinator", "pserver", "trainer")]
        trainer = roles[0]
        trainer.until(folder / "job", lambda s: at(10)(s) and len(s.slots) == 2, etcd=",".join(cluster.endpoints))
        until(kill_leader)
        trainer.until(folder / "job", at(40), etcd=",".join(cluster.endpoints))
        pace.set(0)
        assert [role.wait() for role in roles] == [0] * 5, [role.output for role in roles]
    eager = training.trained_in_one_process(job, training.network(plain=True))
    for name, value in model_of(folder / "job").items():
        torch.testing.assert_close(value, eager[name], rtol=1e-3, atol=1e-4)


def test_torchrun_ranks(folder: Path, pace: Pace) -> None:
    """The first ranks are pservers; rank 0 starts etcd, and ends it
    last. All killed and started again, they go on."""
    options, world = json.dumps(SMALL), 3

    def start() -> list[Program]:
        return [
            Program(folder, SCRIPT, pace.file, options, RANK=str(rank), WORLD_SIZE=str(world)) for rank in range(world)
        ]

    pace.set(0.5)  # it is looked at from outside, which takes its time on a busy machine
    ranks = start()
    ranks[0].until(folder / "jobs" / "blobs" / "runs" / "1", lambda s: at(12)(s) and (s.checkpoint or 0) >= 10)
    for rank in ranks:
        rank.kill()
    assert not await_gone(folder), "its etcd ended with rank 0"
    pace.set(0)  # some may be so late that the job is over
    ranks = start()
    assert [rank.wait() for rank in ranks] == [0] * world, [rank.output for rank in ranks]
    assert re.search("goes on from step [1-9]0", ranks[0].output), ranks[0].output
    assert "pserver 0" in ranks[0].output
    assert "trainer 1" in ranks[-1].output
    assert (folder / "jobs" / "blobs" / "runs" / "1" / "model.safetensors").exists()
