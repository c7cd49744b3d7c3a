"""Jobs on a real Ray of several nodes, which are killed and added: the final bits are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.launch import run_job
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.transpiler.job import Job
from tests.engines.ray_nodes import Nodes, nodes_of_ray
from tests.integration import training
from tests.integration.plays import ROOT, SCRIPT, Pace, assert_same_bits, at, look, whole_state

pytest.importorskip("ray", reason="ray is not installed: make ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Look = Callable[[Supervisor, JobStatus], None]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with nodes_of_ray(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    job = training.job(training.program())
    run_job(job, job_dir=str(folder), quiet=True)
    return whole_state(job, folder)


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path / "pace")


class Course:
    """Does one thing after the other to a running job, each when its status is so."""

    def __init__(self, *acts: tuple[Callable[[Supervisor, JobStatus], Any], Callable[[Supervisor], Any]]) -> None:
        self.acts = list(acts)
        self.places: list[list[str]] = []

    def __call__(self, supervisor: Supervisor, status: JobStatus) -> None:
        self.places.append([listed.place for listed in supervisor.engine.list()])
        if self.acts and self.acts[0][0](supervisor, status):
            self.acts.pop(0)[1](supervisor)


def stored(tmp_path: Path, pace: Pace) -> Job:
    return training.job(training.program(), pace=pace.file, storage=f"file://{tmp_path}/storage/job")


def launch(job: Job, nodes: Nodes, folder: Path, course: Course) -> list[str]:
    """Runs it with two trainers; returns the kinds of its events."""
    from graphft.runtime.engines.ray import Ray

    seen: list[JobStatus] = []

    def look(supervisor: Supervisor, status: JobStatus) -> None:
        seen.append(status)
        course(supervisor, status)

    run_job(job, engine=Ray(nodes.address), trainers=2, job_dir=str(folder), quiet=True, on_status=look)
    assert not course.acts, "the job was over before all was done to it"
    return [event.kind for event in seen[-1].events]


def reached(step: int) -> Callable[[Supervisor, JobStatus], bool]:
    return lambda supervisor, status: at(step)(status)


def test_a_node_is_lost_and_another_joins(
    nodes: Nodes, tmp_path: Path, pace: Pace, undisturbed: dict[str, Tensor]
) -> None:
    """With it are lost whatever roles were there."""
    nodes.set(2)
    pace.set(1.0)
    lost = nodes.workers[0].node_id[:8]

    def kill(supervisor: Supervisor) -> None:
        nodes.kill(nodes.workers[0])

    def whole(supervisor: Supervisor, status: JobStatus) -> bool:
        return len(status.trainers) == len(status.pservers) == 2

    def gone(supervisor: Supervisor, status: JobStatus) -> bool:
        return not any(lost in listed.place for listed in supervisor.engine.list())

    acts = [(gone, lambda supervisor: nodes.add()), (whole, lambda supervisor: pace.set(0.0))]
    course = Course((reached(12), kill), *acts)
    job = stored(tmp_path, pace)
    events = launch(job, nodes, tmp_path / "job", course)
    assert any(f"node {lost}" in places for places in course.places)
    assert "died" in events
    assert_same_bits(whole_state(job, tmp_path / "job"), undisturbed)
    logs = [file.read_text() for file in (tmp_path / "job" / "logs").iterdir()]
    assert len(logs) == 4
    assert all("registered as" in text for text in logs)
    assert any(text.count("registered as") == 2 for text in logs)


def test_the_driver_is_killed_and_another_goes_on(
    nodes: Nodes, tmp_path: Path, pace: Pace, undisturbed: dict[str, Tensor]
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
    assert_same_bits(whole_state(Job.load(job), job), undisturbed)
