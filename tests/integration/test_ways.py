"""Ways to start a job: by hand with any etcd, by torchrun, by an Executor."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.etcd import EmbeddedEtcd, EtcdError
from tests.integration import training
from tests.integration.plays import RUN, SCRIPT, Pace, Program, assert_model, at, await_gone
from tests.support.etcd_servers import EmbeddedCluster
from tests.support.programs_by_hand import linear
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
SMALL = {"trainers": 2, "pservers": 1, "epochs": 1}


@pytest.mark.slow
def test_by_hand_with_a_cluster_whose_leader_dies(folder: Path, pace: Pace) -> None:
    """Roles start in any order, pservers without an index, with an etcd of three members."""
    plain = training.program(plain=True)
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
    assert_model(folder / "job" / "model.safetensors", eager)


def test_torchrun_ranks(folder: Path, pace: Pace) -> None:
    """The first ranks are pservers; rank 0 starts etcd, and ends it last. All killed and started again, they go on."""
    options, world = json.dumps(SMALL), 3

    def start() -> list[Program]:
        return [
            Program(folder, SCRIPT, pace.file, options, RANK=str(rank), WORLD_SIZE=str(world)) for rank in range(world)
        ]

    pace.set(0.5)  # it is looked at from outside, which takes its time on a busy machine
    ranks = start()
    ranks[0].until(folder / RUN, lambda s: at(12)(s) and (s.checkpoint or 0) >= 10)
    for rank in ranks:
        rank.kill()
    assert not await_gone(folder), "its etcd ended with rank 0"
    pace.set(0)  # some may be so late that the job is over
    ranks = start()
    assert [rank.wait() for rank in ranks] == [0] * world, [rank.output for rank in ranks]
    assert re.search("goes on from step [1-9]0", ranks[0].output), ranks[0].output
    assert "pserver 0" in ranks[0].output
    assert "trainer 1" in ranks[-1].output
    assert (folder / RUN / "model.safetensors").exists()


def test_an_executor_runs_a_role_in_this_process(tmp_path: Path, etcd_server: EmbeddedEtcd) -> None:
    """It waits for the job, which the launcher runs meanwhile, and returns 0 when that is complete."""
    data = graphft.arrays(x=torch.randn(64, 200), y=torch.zeros(64, 1), chunk_size=16)
    options = {"data": data, "batch_size": 8, "ft": True, "lease_ttl": 60, "name": f"executor-{uuid.uuid4().hex}"}
    job, endpoints, executor = graphft.transpile(linear(), **options), etcd_server.endpoints[0], graphft.Executor()
    job.save(tmp_path / "job")
    with ThreadPoolExecutor(1) as pool:
        role = pool.submit(executor.run_role, tmp_path / "job", "coordinator", etcd=endpoints)
        assert job.run(job_dir=str(tmp_path / "job"), etcd=endpoints, quiet=True).model.exists()
        assert role.result(120) == 0
    with pytest.raises(graphft.GraphftError, match="there is no role 'worker'"):
        executor.run_role(tmp_path, "worker")
