"""Jobs on a real Slurm of two nodes on this machine: nodes are lost and join, jobs are queued again and drained."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.coordination.status import JobStatus
from graphft.transpiler.job import Job
from tests.driver import epochs
from tests.integration import training
from tests.integration.plays import ROOT, Pace, Played, assert_same_bits, at, look, whole_state
from tests.support.slurm_cluster import DISCARDED, SlurmCluster
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(DISCARDED), reason=f"no real Slurm: {DISCARDED}"), pytest.mark.timeout(1800)]
PATIENCE = 400.0
"""Seconds until something that must happen has happened, on a machine that is busy with other things."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class SlurmJob:
    """A saved job, and what was submitted of it."""

    def __init__(self, cluster: SlurmCluster, folder: Path, pace: Pace) -> None:
        self.cluster, self.folder, self.pace = cluster, folder, pace
        training.job(training.program(), pace=pace.file).save(folder)

    def submit(self, what: Path, *options: str) -> str:
        """Returns Slurm's number of it. `options`: of `graphft slurm`."""
        environment = {**self.cluster.environment, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.cluster.folder)}
        pipes = {"stdout": subprocess.PIPE, "text": True, "check": True}
        run = functools.partial(subprocess.run, env=environment, cwd=self.folder.parent, **pipes)
        script = run([sys.executable, "-m", "graphft", "slurm", what, *options]).stdout
        return str(run(["sbatch", "--parsable"], input=script).stdout).strip()

    def until(self, condition: Callable[[JobStatus], bool]) -> None:
        """Waits for a status of the job; it goes slower when it nears its end meanwhile."""

        def seen() -> bool:
            status = look(self.folder)
            if status is not None and 3 * status.step > 2 * status.spec["total_steps"]:
                self.pace.set(Pace.SLOWEST)
            return status is not None and condition(status)

        until(seen, PATIENCE)

    def starts_again(self, number: str) -> None:
        until(lambda: self.cluster.job_field(number, "Restarts") == "1", PATIENCE)

    def completes(self, number: str) -> None:
        self.pace.set(0.01)
        until(lambda: self.cluster.job_state(number) in OVER, PATIENCE)
        assert self.cluster.job_state(number) == "COMPLETED", self.said()

    def said(self) -> str:
        """Returns what the scripts have said, and Slurm of them."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.parent.rglob("slurm-*.log")))


@pytest.fixture
def saved(cluster: SlurmCluster, tmp_path: Path, pace: Pace) -> Iterator[SlurmJob]:
    """The undisturbed job, saved once more; all nodes are up. Nothing of it is in Slurm afterwards."""
    for name in set(cluster.nodes) - cluster.running:
        cluster.start_node(name)
    until(lambda: cluster.in_state("idle") == set(cluster.nodes), PATIENCE)
    pace.set(0.2)
    yield SlurmJob(cluster, tmp_path / "blobs", pace)
    until(lambda: not cluster.call("squeue", "--noheader") or cluster.call("scancel", "--user=root"), PATIENCE)


def assert_trained(saved: SlurmJob, undisturbed: Played) -> None:
    assert_same_bits(whole_state(Job.load(saved.folder), saved.folder), undisturbed.state)


def test_a_node_is_lost(saved: SlurmJob, undisturbed: Played) -> None:
    number = saved.submit(saved.folder, "--nodes", "2", "--trainers-per-node", "2")
    saved.until(lambda status: status.step >= 10 and len(status.trainers) == 4)
    saved.cluster.kill_node("n2")
    saved.until(lambda status: len(status.trainers) == 2)
    saved.completes(number)
    assert saved.cluster.job_field(number, "Restarts") == "0"
    assert_trained(saved, undisturbed)


def test_the_first_node_is_lost(saved: SlurmJob, undisturbed: Played) -> None:
    """The batch script, the launcher and etcd are lost with it: Slurm starts the job again, on what is left."""
    number = saved.submit(saved.folder, "--nodes", "1-2")
    saved.until(at(20))
    saved.cluster.kill_node("n1")
    saved.starts_again(number)
    saved.completes(number)
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
    folder = saved.folder.parent
    (folder / "train.py").write_text(SCRIPT)
    number = saved.submit(folder / "train.py", "--nodes", "2", "--trainers-per-node", "2")
    until(lambda: (status := look(folder / "run")) is not None and status.step >= 5 * epochs.PER_EPOCH, PATIENCE)
    saved.cluster.call("scancel", "--signal=USR1", "--batch", number)
    saved.starts_again(number)
    saved.completes(number)
    with epochs.trainer(tmp_path / "undisturbed") as trainer:
        trainer.train(epochs=30)
        expected = trainer.state_dict()["model"]
    found = graphft.read_weights(folder / "saved")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
