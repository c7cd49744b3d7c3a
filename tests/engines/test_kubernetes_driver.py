"""A script whose pods are made by its driver's pod: the manifests, and the script on a stand-in for a cluster."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.engines.base import Run
from graphft.runtime.engines.kubernetes import driver
from graphft.runtime.engines.kubernetes.engine import Kubernetes
from tests.driver import epochs
from tests.engines.test_kubernetes_manifests import VERSIONS, printed
from tests.support.cluster import Cluster
from tests.support.commands import refused
from tests.support.kubectl import KubectlStandIn

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.timeout(900)

IMAGE = ("--image", "registry.example/graphft:1")
SCRIPT = """
import time
from pathlib import Path
from tests.driver import epochs

with epochs.trainer(Path("run"), storage="file://{storage}") as trainer:
    print("epoch", trainer.epoch, flush=True)
    while trainer.epoch < 8:
        trainer.train()
        while trainer.epoch == 2 and not Path("{storage}.killed").exists():
            time.sleep(0.05)
    trainer.save(Path("{storage}") / "saved")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text("print('trained')\n")
    return file


def named(made: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (item,) = [item for item in made if item["kind"] == kind]
    return item


RICH = (
    *("--name", "night", "--namespace", "research", "--etcd", "etcd:2379", "--tls-secret", "certs", "--cpu", "2"),
    *("--env", "ATEN_CPU_CAPABILITY=avx2", "--env-from-secret", "s3", "--image-pull-secret", "pull"),
    *("--volume", "data:/data", "--max-failures", "3"),
)


@pytest.mark.parametrize("options", [(), RICH])
def test_by_the_schemas(options: tuple[str, ...], script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    made = printed(capsys, script, *IMAGE, *options)
    for version in (VERSIONS[0], VERSIONS[-1]):
        for item in made:
            schemas.validate(item, version, strict=True)
    kinds = [item["kind"] for item in made]
    assert kinds.index("ConfigMap") < kinds.index("Job")
    assert ("StatefulSet" in kinds) is not bool(options), "an etcd is deployed if none is given"


def test_what_the_drivers_pod_is_given(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = printed(capsys, script, *IMAGE, *RICH)
    job = named(made, "Job")
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "script"]
    assert [*container["command"], *container["args"]] == ["python", f"{mount['mountPath']}/train.py"]
    assert named(made, "ConfigMap")["data"] == {"train.py": "print('trained')\n"}
    account = named(made, "ServiceAccount")["metadata"]["name"]
    binding = named(made, "RoleBinding")
    assert spec["serviceAccountName"] == account == binding["subjects"][0]["name"]
    assert binding["subjects"][0]["namespace"] == "research"
    assert binding["roleRef"]["name"] == named(made, "Role")["metadata"]["name"]
    assert job["spec"]["backoffLimit"] == 3
    values = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert values["GRAPHFT_ENGINE"] == "kubernetes"
    found = Kubernetes()
    assert (found.name, found.namespace, values["GRAPHFT_ETCD"]) == ("night", "research", "etcd:2379")
    assert (found.env, list(found.env_from_secrets)) == ({"ATEN_CPU_CAPABILITY": "avx2"}, ["s3"])
    assert (found.tls_secret, found.pull_secret, list(found.volume or ())) == ("certs", "pull", ["data", "/data"])
    assert Kubernetes(name="other").name == "other"


def test_a_script_has_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = named(printed(capsys, script, *IMAGE, "--args=--lr 0.1 'a $b'"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][1:] == ["--lr", "0.1", "a $$b"]
    assert "expected words as a shell reads them" in refused(capsys, "kubernetes", script, *IMAGE, "--args='a")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--trainers", "2"), "--trainers is for a saved job, and"),
        (("--pserver-cpu", "2"), "--pserver-cpu is for a saved job"),
        (("--gpus", "0"), "--gpus is for a saved job"),
        (("--gpu-resource", "amd.com/gpu"), "--gpu-resource is for a saved job"),
        (("--coordinators", "2"), "--coordinators is for a saved job"),
        (("--etcd", "localhost:2379"), "out of reach"),
        (("--etcd-members", "2"), "odd number"),
        (("--name", "A"), "'A' is no name for objects"),
        (("--env", "GRAPHFT_IMAGE=x"), "--env GRAPHFT_IMAGE is set already"),
        (("--volume", "c:/etc/graphft/script"), "does not meet"),
    ],
)
def test_refused(options: tuple[str, ...], told: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in refused(capsys, "kubernetes", script, *IMAGE, *options)


def test_scripts_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read as UTF-8" in refused(capsys, "kubernetes", tmp_path / "none.py", *IMAGE)
    (tmp_path / "latin.py").write_bytes(b"\xe9 = 1")
    assert "cannot be read as UTF-8" in refused(capsys, "kubernetes", tmp_path / "latin.py", *IMAGE)
    (tmp_path / "large.py").write_bytes(b"#" * (driver.LARGEST + 1))
    assert "which a ConfigMap can hold" in refused(capsys, "kubernetes", tmp_path / "large.py", *IMAGE)
    (tmp_path / "my script.py").touch()
    assert "no name for a file in a ConfigMap" in refused(capsys, "kubernetes", tmp_path / "my script.py", *IMAGE)


def test_options_of_an_engine_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match="'Bad name' is no name for objects"):
        Kubernetes(image="graphft:1", name="Bad name").open(Run(tmp_path, "s3://bucket/job"))
    for text in ("{", "[]"):
        monkeypatch.setenv("GRAPHFT_KUBERNETES", text)
        with pytest.raises(GraphftError, match="expected a JSON object"):
            Kubernetes()


@pytest.mark.skipif(sys.platform != "linux", reason="each pod has a loopback address of its own")
def test_a_driver_that_is_killed_is_followed_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another node: in an empty folder. It goes on from the storage, and the pods of the first are taken away."""
    storage, script = tmp_path / "storage", tmp_path / "train.py"
    storage.mkdir()
    script.write_text(SCRIPT.format(storage=storage / "job"))
    with Cluster(tmp_path / "cluster") as cluster, KubectlStandIn(cluster) as kubectl:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "kubectl").write_text(f'#!/bin/sh\nexec {" ".join(kubectl.command)} "$@"\n')
        (programs / "kubectl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        cluster.apply(printed(capsys, script, *IMAGE, "--volume", f"shared:{storage}"))
        job = cluster.job("train-driver")
        cluster.until(lambda: (storage / "job").exists() and len(cluster.running("trainer")) == 2)
        first = {pod.name for pod in cluster.running("trainer") + cluster.running("pserver")}
        owners = {owner["uid"] for name in first for owner in owners_of(cluster, name)}
        assert owners == {cluster.pods["train-driver-0"].fields["metadata.uid"]}
        cluster.until(lambda: checkpoints(storage) >= 1)
        cluster.pods["train-driver-0"].signal(signal.SIGKILL)
        cluster.until(lambda: job.failures == 1)
        (storage / "job.killed").touch()  # only now the script goes on
        cluster.until(lambda: job.complete or job.failed, 600)
        assert job.complete, cluster.logs(60)
        assert job.failures == 1
        assert not first & cluster.pods.keys(), "those of the driver that died"
        assert not [pod for pod in cluster.pods if "driver" not in pod and "etcd" not in pod]
    with epochs.trainer(tmp_path / "undisturbed") as trainer:
        trainer.train(epochs=8)
        expected = trainer.state_dict()["model"]
    found = graphft.read_weights(storage / "job" / "saved")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def checkpoints(storage: Path) -> int:
    return len([*storage.glob("job/checkpoints/*")])


def owners_of(cluster: Cluster, pod: str) -> list[dict[str, Any]]:
    return list(cluster.objects["Pod", pod]["metadata"]["ownerReferences"])
