"""What is wrong from the beginning: a clear error, a status that is not 0, soon, and nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import graphft
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.transpiler import Job
from tests.integration import training
from tests.integration.plays import Program

pytestmark = pytest.mark.timeout(600)
START = ("-m", "graphft", "start")


@pytest.fixture(scope="module")
def job() -> Job:
    return training.job(training.program(plain=True), trainers=1, pservers=1, epochs=1)


def fails(folder: Path, *arguments: str | Path, status: int = 2, seconds: float = 240.0, **environment: str) -> str:
    """Runs a process that must fail in time, and returns what it says."""
    program = Program(folder, *arguments, **environment)
    assert program.wait(seconds) == status, program.output
    return program.output


def test_no_etcd_to_start(folder: Path, job: Job) -> None:
    job.save(folder / "job")
    text = fails(folder, "-m", "graphft", "launch", "--job", folder / "job", ETCD_BIN=str(folder / "no-etcd"), PATH="")
    assert "error[etcd-missing]" in text


def test_another_job_of_the_same_name_in_etcd(folder: Path, job: Job, etcd_server: EmbeddedEtcd) -> None:
    other = Job.make(job.source, job.config.replace(epochs=2, name="foreign"))
    other.save(folder / "other")
    Job.make(job.source, job.config.replace(name="foreign")).save(folder / "job")
    endpoint = etcd_server.endpoints[0]
    first = Program(folder, *START, "pserver", "--job", folder / "other", "--etcd", endpoint)
    first.until(folder / "other", lambda s: bool(s.pservers), etcd=endpoint)
    text = fails(folder, *START, "trainer", "--job", folder / "job", "--etcd", endpoint)
    first.kill()
    assert "error[foreign-job]" in text
    assert "etcd has another run named foreign" in text


MAKE = "import torch\n\n\ndef make():\n    return [(torch.zeros(8), 0)] * {records}\n"


def test_data_that_changed(folder: Path, job: Job) -> None:
    """The dataset's source was edited, and gives fewer records: no role is started again for that."""
    folder.mkdir()
    source = folder / "blobs.py"
    source.write_text(MAKE.format(records=80))
    described = job.config.replace(data=graphft.dataset(f"{source}:make", chunk_size=40))
    Job.make(job.source, described).save(folder / "job")
    source.write_text(MAKE.format(records=60))
    text = fails(folder, "-m", "graphft", "launch", "--job", folder / "job", status=1)
    assert re.search("trainer 0 cannot (start|go on)", text), "the latter where it took long to find out"
    assert f"the source of the dataset, {source}, was changed since then" in text
    assert "run the changed script again" in text
