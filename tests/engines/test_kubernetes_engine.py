"""Kubernetes as an engine, with a stand-in for kubectl whose pods are local processes. It is no cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphft.errors import UsageError
from graphft.runtime.coordination.job_files import publish
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import read_status
from graphft.runtime.engines.base import EngineError, Order, Run
from graphft.runtime.engines.kubernetes import engine as engine_module
from graphft.runtime.engines.kubernetes.engine import Kubernetes, KubernetesEngine, exit_status
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.transpiler import Job
from tests.engines.conformance import check
from tests.integration import training
from tests.integration.plays import Pace, Played, assert_same_bits, play, whole_state
from tests.support.cluster import Cluster
from tests.support.kubectl import KubectlStandIn
from tests.support.waiting import until

yaml = pytest.importorskip("yaml")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="each pod has a loopback address of its own"),
]
WAIT = 300.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as made:
        yield made


@pytest.fixture
def kubectl(cluster: Cluster) -> Iterator[KubectlStandIn]:
    with KubectlStandIn(cluster) as made:
        yield made


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LOOK_SECONDS", 0.1)


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path / "pace")


@pytest.fixture
def job(tmp_path: Path, pace: Pace) -> Job:
    job = training.job(
        training.program(), pace=pace.file, lease_ttl=20, storage=f"file://{tmp_path}/storage/blobs", name="pods"
    )
    job.save(tmp_path / "job")
    publish(tmp_path / "job")
    return job


@pytest.fixture
def engine(job: Job, tmp_path: Path, kubectl: KubectlStandIn) -> Iterator[KubernetesEngine]:
    run = Run(tmp_path / "job", job.config.storage, {"GRAPHFT_DEBUG": "0"}, {"trainer": {"cpu": 0.5}})
    made = Kubernetes(image="graphft:1", kubectl=kubectl.command).open(run)
    assert isinstance(made, KubernetesEngine)
    yield made
    made.close()


@pytest.fixture
def etcd_of_job(etcd_server: EmbeddedEtcd) -> Iterator[str]:
    yield ",".join(etcd_server.endpoints)
    with Etcd(etcd_server.endpoints, deadline=60) as etcd:
        for prefix in Keys("pods").everything:
            etcd.delete_prefix(prefix)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(training.job(training.program()), tmp_path_factory.mktemp("undisturbed") / "job")


def test_what_holds_for_every_engine(engine: KubernetesEngine) -> None:
    engine.prepare()
    check(engine)


@pytest.mark.slow
def test_a_job(
    engine: KubernetesEngine, job: Job, pace: Pace, tmp_path: Path, etcd_of_job: str, undisturbed: Played
) -> None:
    """A pserver is killed, a trainer is asked to leave; both are started again."""
    pace.set(Pace.SLOW)
    orders = [Order("pserver", n, etcd_of_job) for n in range(2)] + [Order("trainer", n, etcd_of_job) for n in range(3)]
    processes = {order.name: engine.start(order) for order in orders}
    for process in processes.values():
        process.await_made()
    assert {(process.place, process.pid) for process in processes.values()} == {("node", 1)}
    assert sorted((p.role, p.index, p.state) for p in engine.list()) == [(o.role, o.index, "running") for o in orders]

    def is_in_the_middle() -> bool:
        """With all trainers: one of them can do it all."""
        with Etcd(etcd_of_job.split(","), deadline=60) as client:
            status = read_status(client, Keys("pods"), deadline=60) if client.count(Keys("pods").spec) else None
            return status is not None and status.step >= 3 and len(status.trainers) == 3

    until(is_in_the_middle, WAIT)
    processes["pserver 0"].send_signal(signal.SIGKILL)
    assert processes["pserver 0"].wait(WAIT) == -signal.SIGKILL
    processes["pserver 0"] = engine.start(orders[0])
    processes["trainer 1"].send_signal(signal.SIGTERM)
    assert processes["trainer 1"].wait(WAIT) == 0
    assert any("left: SIGTERM asked this trainer to" in line for line in engine.logs(orders[3], 5))
    processes["trainer 1"] = engine.start(orders[3])
    assert "left: SIGTERM" in (tmp_path / "job" / "logs" / "trainer-1.log").read_text()
    pace.set(0)
    assert {name: process.wait(WAIT) for name, process in processes.items()} == dict.fromkeys(processes, 0)
    assert not engine.list()
    engine.close()
    assert_same_bits(whole_state(job, Path(job.config.storage.removeprefix("file://"))), undisturbed.state)


def test_without_room(engine: KubernetesEngine, cluster: Cluster) -> None:
    """It waits; both signals take the order back."""
    cluster.room = 0
    waiting = [engine.start(Order("trainer", n, "127.0.0.1:1")) for n in range(2)]
    until(lambda: {p.place for p in waiting} == {"waiting for room: 0/1 nodes are available"})
    assert [p.state for p in engine.list()] == ["waiting", "waiting"]
    for process, signum in zip(waiting, (signal.SIGTERM, signal.SIGKILL), strict=True):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.send_signal(signum)
        assert process.wait(WAIT) == -signum
        assert process.pid == 0
        process.send_signal(signum)  # nothing is left of it
    assert not cluster.pods


def test_a_lost_node_takes_its_pods_along(engine: KubernetesEngine, cluster: Cluster) -> None:
    process = engine.start(Order("pserver", 0, "127.0.0.1:1"))
    until(lambda: process.poll() is None and len(cluster.pods) == 1)
    cluster.remove(list(cluster.pods))
    assert process.wait(WAIT) == -signal.SIGKILL
    assert engine.logs(Order("pserver", 0, ""), 5) == []


def test_the_cluster_does_not_answer(engine: KubernetesEngine, cluster: Cluster, kubectl: KubectlStandIn) -> None:
    """Nothing ends by that; what was wanted of it is refused, and can be wanted again."""
    cluster.room = 0
    order = Order("trainer", 0, "127.0.0.1:1")
    process = engine.start(order)
    kubectl.fail = "Unable to connect to the server"
    with pytest.raises(EngineError, match="kubectl create: Unable to connect"):
        engine.start(Order("trainer", 1, "127.0.0.1:1"))
    seen = len(kubectl.calls)
    until(lambda: len(kubectl.calls) > seen + 3)
    process.send_signal(signal.SIGKILL)
    assert process.poll() is None
    kubectl.fail = ""
    process.send_signal(signal.SIGKILL)
    assert process.wait(WAIT) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"phase": "Pending"}, None),
        ({"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}, 0),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 143}}}]}, -15),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 137}}}]}, -9),
        ({"phase": "Failed", "reason": "Evicted"}, -9),
    ],
)
def test_exit_statuses(status: dict[str, Any], expected: int | None) -> None:
    assert exit_status(status) == expected


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFT_IMAGE", raising=False)
    stored, here = "s3://bucket/job", "/jobs/blobs"
    wrong = [(Kubernetes(), stored), (Kubernetes("i", kubectl=("no-such-program",)), stored)]
    for options, url in (*wrong, (Kubernetes("i", kubectl=(sys.executable,)), here)):
        with pytest.raises(UsageError):
            options.open(Run(tmp_path, url))


def test_its_pods_by_the_schemas(engine: KubernetesEngine) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    pod = yaml.safe_load(engine._pod(Order("trainer", 1, "etcd:2379"), "pods-trainer-1-abcde"))
    assert pod["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "0.5", "memory": "4Gi"},
        "limits": {"memory": "4Gi"},
    }
    for version in ("1.28", "1.37"):
        schemas.validate(pod, version, strict=True)
