"""A job's keys in the session's etcd, emptied afterwards; and a small job."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.coordination import connect as connect_module
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd
from graphft.runtime.etcd import open as open_module
from graphft.transpiler import Job
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear


@pytest.fixture
def keys(etcd: Etcd) -> Iterator[Keys]:
    """Keys of a job that nobody else uses."""
    keys = Keys(f"job-{uuid.uuid4().hex[:16]}")
    yield keys
    etcd.delete_prefix(f"/{keys.job}")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For etcds that answer, some time: what the product opens waits for that."""
    monkeypatch.setattr(open_module, "Etcd", Patient)


@pytest.fixture
def soon(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For etcds that do not answer."""
    monkeypatch.setattr(open_module, "Etcd", Etcd)
    monkeypatch.setattr(connect_module, "ANSWER_SECONDS", 0.3)


@pytest.fixture(scope="session")
def job() -> Job:
    """Linear regression, 2 trainers, 2 pservers, 4 steps."""
    data = graphft.arrays(chunk_size=8, x=torch.arange(6400.0).reshape(32, 200) / 6400, y=torch.zeros(32, 1))
    return graphft.transpile(
        linear(), chunks=data, batch_size=4, trainers=2, pservers=2, ft=True, slice_unit=64, min_block=64
    )


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
