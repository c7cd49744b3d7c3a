"""The pods of a job's manifests, run as local processes: what becomes of a job that loses some. It is no cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graphft.errors import GraphftError
from graphft.runtime.coordination.job_files import fetch, publish
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.etcd.client import open_etcd
from graphft.transpiler.job import Job
from tests.engines.test_kubernetes_manifests import manifests_of
from tests.integration import training
from tests.integration.plays import Pace, Played, assert_same_bits, note_look, whole_state
from tests.support.cluster import Cluster, JobState

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as made:
        yield made


class OnCluster:
    """A job in a storage in `folder`, seen from outside."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.pace = cluster, folder, Pace(folder / "pace")
        self.pace.set(Pace.SLOW)
        self.storage = folder / "storage" / "blobs"
        options = {"lease_ttl": 20, "checkpoint_every": 4, "storage": f"file://{self.storage}"}
        self.job = training.job(training.program(), pace=self.pace.file, **options)
        self.job.save(folder / "saved")
        publish(folder / "saved")
        self.config = self.job.config.to_json()
        volume = ("--volume", f"storage:{folder}/storage")
        cluster.apply(manifests_of(self.job, self.job.config.storage, *volume))

    def status(self) -> JobStatus | None:
        try:
            with open_etcd([f"http://{self.cluster.address('blobs-etcd')}:2379"]) as client:
                return read_status(client, Keys("blobs"), deadline=1.0)
        except GraphftError:
            return None

    def until(self, condition: Callable[[JobStatus], bool]) -> JobStatus:
        last: list[JobStatus] = []

        def seen() -> bool:
            status = self.status()
            note_look(self.config, status, True)
            if status is None:
                return False
            last[:] = [status]
            return condition(status)

        self.cluster.until(seen)
        note_look(self.config, None, False)
        return last[0]

    def goes_on(self) -> None:
        """Returns when all shards serve, and a step was made since."""
        before = self.until(lambda s: len(s.pservers) == 2 and self.cluster.ready("pserver") == 2)
        self.until(lambda s: s.step > before.step + 1)

    @property
    def trainers(self) -> JobState:
        return self.cluster.job("blobs-trainer")

    def completes(self) -> None:
        self.pace.set(0)
        self.cluster.until(lambda: self.trainers.complete or self.trainers.failed)
        assert self.trainers.complete, self.trainers.failed

    def assert_same(self, undisturbed: Played) -> None:
        copy = self.folder / "copy"
        fetch(self.job.config.storage, copy)
        assert_same_bits(whole_state(Job.load(copy), copy), undisturbed.state)
        assert (self.storage / "model.safetensors").read_bytes() == undisturbed.result.model.read_bytes()


@pytest.mark.slow
def test_a_job_that_loses_pods_gives_the_same_bits(cluster: Cluster, tmp_path: Path, undisturbed: Played) -> None:
    job = OnCluster(cluster, tmp_path)
    job.until(lambda s: s.step >= 6 and s.checkpoint is not None and s.checkpoint >= 4)
    cluster.until(lambda: cluster.ready("etcd") == 3 and cluster.ready("pserver") == 2)

    before = cluster.pods["blobs-pserver-0"].restarts
    cluster.pods["blobs-pserver-0"].signal(signal.SIGKILL)
    cluster.until(lambda: cluster.pods["blobs-pserver-0"].restarts > before)
    job.goes_on()

    cluster.pods["blobs-trainer-1"].signal(signal.SIGKILL)
    cluster.until(lambda: job.trainers.failures == 1)
    job.until(lambda s: len(s.trainers) == 3)

    for name in ("blobs-pserver-1", "blobs-trainer-0", "blobs-etcd-0"):  # as a drain of one node after the other
        old = cluster.pods[name]
        cluster.until(lambda old=old: old.ready)
        cluster.delete_pod(name)
        cluster.until(lambda name=name, old=old: cluster.pods.get(name, old) is not old)
        cluster.until(lambda: cluster.ready("etcd") == 3)
        job.goes_on()
    assert "left: SIGTERM asked this pserver to" in (cluster.folder / "blobs-pserver-1.log").read_text()

    job.completes()
    assert job.trainers.ignored >= 1, "the one that was asked to leave is no failure, and its place is taken"
    job.assert_same(undisturbed)
    cluster.until(lambda: cluster.ready("pserver") == 2)  # they stay: nothing is started again and again
    assert not cluster.running("trainer")
