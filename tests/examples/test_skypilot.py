"""The task file for SkyPilot: its fields, and what it runs, with ssh and SkyPilot's variables as on its machines."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from graphft.transpiler import Job
from tests.integration import training
from tests.integration.plays import ROOT, Played, assert_same_bits, play, whole_state
from tests.support.ssh import StandIn

yaml = pytest.importorskip("yaml")
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is Linux's")]
FILE = ROOT / "examples" / "skypilot.yaml"
FIELDS = {
    "": {"name", "num_nodes", "resources", "workdir", "envs", "file_mounts", "setup", "run"},
    "resources": {"cpus", "memory", "use_spot"},
    "/data": {"source", "mode"},
}
"""Those used, as the schemas of SkyPilot 0.14.1 have them, which refuse all others."""
IPS = "127.0.0.1\n127.0.0.2\n127.0.0.3"
SCRIPT = """
import os, sys
sys.path.insert(0, {folder!r})
import training

job = training.job(training.program(), storage=os.environ["STORAGE"])
if __name__ == "__main__":
    job.run()
"""


@pytest.fixture
def task() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Of a machine: ~/graphft is this environment, and ssh lets it in everywhere."""
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "home" / "graphft" / "bin").mkdir(parents=True)
    scripts = {
        "bin/ssh": [*StandIn(tmp_path / "machines").command],
        "graphft/bin/graphft": [sys.executable, "-m", "graphft"],
    }
    for name, command in scripts.items():
        script = tmp_path / "home" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        script.chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT.format(folder=str(Path(training.__file__).parent)))
    return {
        "HOME": str(tmp_path / "home"),
        "PATH": os.pathsep.join([str(tmp_path / "home" / "bin"), os.environ["PATH"]]),
        "SKYPILOT_NUM_NODES": "3",
        "SKYPILOT_NODE_IPS": IPS,
        "STORAGE": f"file://{tmp_path}/storage/blobs",
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(training.job(training.program()), tmp_path_factory.mktemp("undisturbed") / "job")


def test_its_fields(task: Mapping[str, Any]) -> None:
    assert set(task) == FIELDS[""]
    assert set(task["resources"]) == FIELDS["resources"]
    assert {path: set(mount) for path, mount in task["file_mounts"].items()} == {"/data": FIELDS["/data"]}
    assert all(isinstance(task[name], str) for name in ("name", "workdir", "setup", "run"))
    assert all(isinstance(value, str) for value in task["envs"].values())
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    assert str(task["setup"]).splitlines()[-1].endswith("graphft etcd --install")


def test_what_it_runs(
    task: Mapping[str, Any], variables: Mapping[str, str], tmp_path: Path, undisturbed: Played
) -> None:
    """The first machine's launcher has processes on all; the model is in the storage."""
    done = _run(task, {**variables, "SKYPILOT_NODE_RANK": "0"}, tmp_path)
    assert done.returncode == 0, done.stderr
    storage = tmp_path / "storage" / "blobs" / "runs" / "1"
    assert (storage / "model.safetensors").exists()
    (folder,) = (tmp_path / "jobs").glob("*/runs/1")
    assert_same_bits(whole_state(Job.load(folder), storage), undisturbed.state)
    assert {p.name for p in (folder / "logs").glob("*.log")} >= {f"trainer-{n}.log" for n in range(3)}


def test_the_others_have_nothing_to_do(task: Mapping[str, Any], variables: Mapping[str, str], tmp_path: Path) -> None:
    done = _run(task, {**variables, "SKYPILOT_NODE_RANK": "1"}, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "storage").exists()


def _run(task: Mapping[str, Any], variables: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """As SkyPilot does. A launcher that takes too long is killed, and its processes end with it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **task["envs"], **variables}
    command = ["bash", "-c", task["run"]]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
