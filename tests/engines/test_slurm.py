"""Jobs on a real Slurm of two nodes on this machine: nodes are lost and join, jobs are queued again and drained."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphft
from graphft.transpiler.job import Job
from tests.driver import epochs
from tests.engines.slurm_jobs import SlurmJob
from tests.integration import training
from tests.integration.plays import Pace, Played, assert_same_bits, at, look, play, whole_state
from tests.support.slurm_cluster import DISCARDED, SlurmCluster
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(DISCARDED), reason=f"no real Slurm: {DISCARDED}"), pytest.mark.timeout(1800)]
NODES = 300.0
"""Seconds until Slurm has seen a change of a node."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("undisturbed")
    return play(training.job(training.program(), pace=Pace(folder / "pace").file), folder / "job")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def saved(cluster: SlurmCluster, undisturbed: Played, tmp_path: Path) -> Iterator[SlurmJob]:
    """The undisturbed job, saved once more; all nodes are up."""
    for name in set(cluster.nodes) - cluster.running:
        cluster.start_node(name)
    until(lambda: cluster.in_state("idle") == set(cluster.nodes), NODES)
    pace = Pace(tmp_path / "pace")
    pace.set(0.2)
    saved = SlurmJob(cluster, training.job(training.program(), pace=pace.file), tmp_path / "blobs", pace)
    yield saved
    saved.leave()


def assert_trained(saved: SlurmJob, undisturbed: Played) -> None:
    assert_same_bits(whole_state(Job.load(saved.folder), saved.folder), undisturbed.state)


def test_a_node_is_lost(saved: SlurmJob, undisturbed: Played) -> None:
    number = saved.submit("--nodes", "2", "--trainers-per-node", "2")
    saved.until(lambda status: status.step >= 10 and len(status.trainers) == 4)
    saved.cluster.kill_node("n2")
    saved.until(lambda status: len(status.trainers) == 2)
    assert saved.ends(number) == "COMPLETED"
    assert saved.cluster.job_field(number, "Restarts") == "0"
    assert_trained(saved, undisturbed)


def test_the_first_node_is_lost(saved: SlurmJob, undisturbed: Played) -> None:
    """With the batch script, the launcher and etcd: Slurm starts the job again, on what is left."""
    number = saved.submit("--nodes", "1-2")
    saved.until(at(20))
    saved.cluster.kill_node("n1")
    until(lambda: saved.cluster.job_field(number, "Restarts") == "1", NODES)
    assert saved.ends(number) == "COMPLETED"
    assert f"resuming {saved.folder} at step " in saved.said()
    assert_trained(saved, undisturbed)


SCRIPT = """
import time
from pathlib import Path
from tests.driver import epochs

with epochs.trainer(Path("run")) as trainer:
    while trainer.epoch < 30:
        trainer.train()
        time.sleep(0.5)
    trainer.save("saved")
"""


def test_a_trainers_script_is_drained_and_goes_on(saved: SlurmJob, tmp_path: Path) -> None:
    """`graphft slurm SCRIPT.py`."""
    folder = saved.folder.parent
    (folder / "train.py").write_text(SCRIPT)
    number = saved.submit_script(folder / "train.py", "--nodes", "2", "--trainers-per-node", "2")
    until(lambda: (status := look(folder / "run")) is not None and status.step >= 5 * epochs.PER_EPOCH, NODES)
    saved.signal(number, signal.SIGUSR1, "--batch")
    until(lambda: saved.cluster.job_field(number, "Restarts") == "1", NODES)
    assert saved.ends(number) == "COMPLETED", (folder / f"slurm-{number}.log").read_text()
    with epochs.trainer(tmp_path / "undisturbed") as trainer:
        trainer.train(epochs=30)
        expected = trainer.state_dict()["model"]
    found = graphft.read_weights(folder / "saved")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
