"""A job's keys in the session's etcd, emptied afterwards; and a small job."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.coordination import connect as connect_module
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.engines import local
from graphft.runtime.engines.base import Run
from graphft.runtime.engines.local import LocalEngine
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.etcd import client as client_module
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.transpiler.job import Job
from tests.runtime.stubs import Stubs
from tests.runtime.trainers import Stage, Staged
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear_job


@pytest.fixture
def keys(etcd: Etcd) -> Iterator[Keys]:
    """Keys of a job that nobody else uses."""
    keys = Keys(f"job-{uuid.uuid4().hex[:16]}")
    yield keys
    etcd.delete_prefix(f"/{keys.job}")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test works in a folder of its own, and its environment says nothing of a job."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("GRAPHFT_") and n != "GRAPHFT_TEST_SESSION"]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For etcds that answer, some time: what the product opens waits for that."""
    monkeypatch.setattr(client_module, "Etcd", Patient)


@pytest.fixture
def soon(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For etcds that do not answer."""
    monkeypatch.setattr(client_module, "Etcd", Etcd)
    monkeypatch.setattr(connect_module, "ANSWER_SECONDS", 0.3)


@pytest.fixture
def staged(etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> Iterator[Staged]:
    with ExitStack() as stack:
        yield lambda job: Stage(stack, etcd_server, keys, job, tmp_path)


@pytest.fixture(scope="session")
def job() -> Job:
    """Linear regression, 2 trainers, 2 pservers, 4 steps."""
    data = graphft.arrays(chunk_size=8, x=torch.arange(6400.0).reshape(32, 200) / 6400, y=torch.zeros(32, 1))
    return linear_job(data=data, pservers=2)


@pytest.fixture(scope="session")
def coordinated(job: Job) -> Job:
    """The same job, whose chunks a coordinator gives out."""
    return Job.make(job.source, job.config.replace(dispatch="coordinator"))


@pytest.fixture
def saved(job: Job, tmp_path: Path) -> Path:
    job.save(tmp_path / "job")
    return tmp_path / "job"


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """Roles set up the logging of their whole process."""
    root, log = logging.getLogger(), logging.getLogger("graphft")
    handlers, level, own = root.handlers[:], root.level, log.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    log.setLevel(own)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubs]:
    stubs = Stubs()
    monkeypatch.setattr(local, "start_role", stubs)
    yield stubs
    for process in stubs.processes:
        process.kill()
        process.wait()


@pytest.fixture
def supervise(etcd: Etcd, keys: Keys, tmp_path: Path, stubs: Stubs) -> Iterator[Callable[..., Supervisor]]:
    made: list[Supervisor] = []

    def make(max_restarts: int = 3, restart: bool = True, client: Etcd | None = None) -> Supervisor:
        engine = LocalEngine(Run(tmp_path, str(tmp_path)), fork_server=False)
        made.append(Supervisor(tmp_path, keys, client or etcd, "", engine, max_restarts, restart))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.stop()
