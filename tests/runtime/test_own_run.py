"""Which run a script's job has made: by what it is, not by its folder's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.errors import GraphftError
from graphft.runtime.coordination.job_storage import publish
from graphft.runtime.launcher.own_run import run_of
from graphft.transpiler import Job

EMPTY_MODEL = (2).to_bytes(8, "little") + b"{}"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(job: Job, name: str, complete: bool) -> str:
    folder = Path("jobs", name)
    job.save(folder)
    if complete:
        (folder / "model.safetensors").write_bytes(EMPTY_MODEL)
    return str(folder)


def test_the_newest_that_is_complete_counts(job: Job) -> None:
    name, other = job.config.name, Job.make(job.source, job.config.replace(passes=job.config.passes + 1))
    with pytest.raises(GraphftError, match=f"there is no run of this job: no jobs/{name}") as caught:
        run_of(job)
    assert "job.run()" in caught.value.help
    saved(other, name, complete=True)
    with pytest.raises(GraphftError, match=f"no run of this job: jobs/{name} differs in: passes {other.config.passes}"):
        run_of(job)
    unfinished = saved(job, f"{name}-2", complete=False)
    assert run_of(job) == unfinished
    for number in (3, 4):
        newest = saved(job, f"{name}-{number}", complete=True)
        assert run_of(job) == newest
    saved(job, f"{name}-5", complete=False)
    assert run_of(job) == newest
    Path("jobs", f"{name}-4", "job.json").write_text("{")
    assert run_of(job) == f"jobs/{name}-3"


def test_one_that_only_its_storage_has(job: Job, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    stored = Job.make(job.source, job.config.replace(storage=url))
    folder = Path(saved(stored, job.config.name, complete=False))
    publish(folder)
    assert run_of(stored) == str(folder)
    folder.rename(tmp_path / "elsewhere")
    assert run_of(stored) == url
