"""The job that runs on every engine, and its undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.ray_nodes import Nodes, nodes_of_ray
from tests.integration import training
from tests.integration.plays import Pace, Played, play
from tests.support.slurm_cluster import SlurmCluster


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path / "pace")


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "blobs"
    training.job(training.program()).save(folder)
    return folder


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(training.job(training.program()), tmp_path_factory.mktemp("undisturbed") / "job")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with nodes_of_ray(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
