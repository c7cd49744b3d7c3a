"""Jobs on a real Ray of several nodes, which are killed and added: the final bits are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphft.runtime.launcher.supervisor import Supervisor
from graphft.transpiler.job import Job
from tests.engines.ray_nodes import Nodes
from tests.integration import training
from tests.integration.plays import ROOT, SCRIPT, Act, Pace, Played, assert_same_bits, at, look, play, whole_state

pytest.importorskip("ray", reason="ray is not installed: make ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_node_is_lost_and_another_joins(nodes: Nodes, tmp_path: Path, pace: Pace, undisturbed: Played) -> None:
    """The roles that were there are lost with it."""
    from graphft.runtime.engines.ray import Ray

    nodes.set(2)
    pace.set(1.0)
    lost = nodes.workers[0].node_id[:8]

    def used(supervisor: Supervisor) -> bool:
        return any(f"node {lost}" == listed.place for listed in supervisor.engine.list())

    def kill(supervisor: Supervisor) -> None:
        assert used(supervisor)
        nodes.kill(nodes.workers[0])

    acts = [
        Act(at(12), kill),
        Act(lambda status: True, lambda supervisor: not used(supervisor) and nodes.add()),
        Act(lambda status: len(status.trainers) == len(status.pservers) == 2, lambda supervisor: pace.set(0.0)),
    ]
    job = training.job(training.program(), pace=pace.file, storage=f"file://{tmp_path}/storage/job")
    played = play(job, tmp_path / "job", acts, engine=Ray(nodes.address), trainers=2)
    assert "died" in played.events
    assert_same_bits(played.state, undisturbed.state)
    logs = [file.read_text() for file in (tmp_path / "job" / "logs").iterdir()]
    assert len(logs) == 4
    assert all("registered as" in text for text in logs)
    assert any(text.count("registered as") == 2 for text in logs)


def test_the_driver_is_killed_and_another_goes_on(
    nodes: Nodes, tmp_path: Path, pace: Pace, undisturbed: Played
) -> None:
    nodes.set(2)
    options = f'{{"storage": "file://{tmp_path}/storage/job"}}'
    command = [sys.executable, "-m", "graphft", "launch", "--engine", "ray", "--trainers", "2", "--quiet"]
    command += [str(SCRIPT), str(pace.file), options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": nodes.address}
    for machine, step in (("one", 15), ("one", 30), ("two", 0)):  # in the same folder, and on another machine
        pace.set(0.3 if step else 0.0)
        folder = tmp_path / machine
        folder.mkdir(exist_ok=True)
        with (folder / "output").open("ab") as out:
            driver = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        try:
            while step and driver.poll() is None:
                status = look(folder / "jobs" / "blobs" / "runs" / "1")
                if status is not None and at(step)(status):
                    driver.send_signal(signal.SIGKILL)
                    driver.wait()
            assert driver.wait(600) == (-signal.SIGKILL if step else 0), (folder / "output").read_text()
        finally:
            driver.kill()
            driver.wait()
    assert "resuming jobs/blobs/runs/1 at step" in (folder / "output").read_text()
    job = folder / "jobs" / "blobs" / "runs" / "1"
    assert_same_bits(whole_state(Job.load(job), job), undisturbed.state)
