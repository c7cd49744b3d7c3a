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
    *("--name", "night", "--etcd", "etcd:2379", "--tls-secret", "certs", "--cpu", "2"),
    *("--env", "ATEN_CPU_CAPABILITY=avx2", "--env-from-secret", "s3", "--image-pull-secret", "pull"),
    *("--volume", "data:/data"),
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
    assert container["command"] == ["python", f"{mount['mountPath']}/train.py"]
    assert named(made, "ConfigMap")["data"] == {"train.py": "print('trained')\n"}
    account = named(made, "ServiceAccount")["metadata"]["name"]
    binding = named(made, "RoleBinding")
    assert spec["serviceAccountName"] == account == binding["subjects"][0]["name"]
    assert binding["roleRef"]["name"] == named(made, "Role")["metadata"]["name"]
    values = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert values["GRAPHFT_ENGINE"] == "kubernetes"
    found = Kubernetes()
    assert (found.name, values["GRAPHFT_ETCD"]) == ("night", "etcd:2379")
    assert (found.env, list(found.env_from_secrets)) == ({"ATEN_CPU_CAPABILITY": "avx2"}, ["s3"])
    assert (found.tls_secret, found.pull_secret, list(found.volume or ())) == ("certs", "pull", ["data", "/data"])
    assert Kubernetes(name="other").name == "other"


def test_a_script_has_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = named(printed(capsys, script, *IMAGE, "--args=--lr 0.1 'a $b'"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][2:] == ["--lr", "0.1", "a $$b"]
    assert "expected words as a shell reads them" in refused(capsys, "kubernetes", script, *IMAGE, "--args='a")


def test_refused(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, rule in ((("--trainers", "2"), "option"), (("--etcd", "localhost:2379"), "etcd-endpoints")):
        assert f"[{rule}]" in refused(capsys, "kubernetes", script, *IMAGE, *options)
    assert "[option]" in refused(capsys, "kubernetes", tmp_path / "none.py", *IMAGE)


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
