"""The task file for SkyPilot: its fields, and what it runs on machines but the first."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.plays import ROOT

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.timeout(600)
FILE = ROOT / "examples" / "skypilot.yaml"
FIELDS = {
    "": {"name", "num_nodes", "resources", "workdir", "envs", "file_mounts", "setup", "run"},
    "resources": {"cpus", "memory", "use_spot"},
    "/data": {"source", "mode"},
}
"""Those used, as the schemas of SkyPilot 0.14.1 have them, which refuse all others."""


@pytest.fixture
def task() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


def test_its_fields(task: Mapping[str, Any]) -> None:
    assert set(task) == FIELDS[""]
    assert set(task["resources"]) == FIELDS["resources"]
    assert {path: set(mount) for path, mount in task["file_mounts"].items()} == {"/data": FIELDS["/data"]}
    assert all(isinstance(task[name], str) for name in ("name", "workdir", "setup", "run"))
    assert all(isinstance(value, str) for value in task["envs"].values())
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    assert str(task["setup"]).splitlines()[-1].endswith("graphft etcd --install")


def test_the_others_have_nothing_to_do(task: Mapping[str, Any], tmp_path: Path) -> None:
    machines = {
        "SKYPILOT_NUM_NODES": "3",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n127.0.0.3",
        "HOME": str(tmp_path),
    }
    environment = {**os.environ, **task["envs"], **machines, "SKYPILOT_NODE_RANK": "1"}
    command = ["bash", "-c", task["run"]]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
