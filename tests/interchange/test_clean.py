"""`graphft clean`, after real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.cli import main
from graphft.runtime.driver.making import make
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.launcher.process_ends import note_saved
from graphft.runtime.process.folder_lock import locked
from tests.driver import epochs
from tests.interchange.test_job_state import make_job
from tests.support.commands import refused


def cleaned(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert main(["clean", *options]) == 0
    return [line.split(", ")[0] for line in capsys.readouterr().out.splitlines()]


def test_what_a_complete_job_has_no_use_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job can still be looked at, and gone on with; without its checkpoints it has a model."""
    monkeypatch.chdir(tmp_path)
    whole = graphft.read_weights(make_job(2, passes=3, name="whole").run(quiet=True).model)
    make_job(2, name="lin").run(quiet=True)
    make_job(2, name="begun").save("jobs/begun")
    Path("jobs/begun/etcd").mkdir()
    capsys.readouterr()
    assert cleaned(capsys, "--dry-run")[:2] == [f"would delete jobs/{name}/runs/1/etcd" for name in ("whole", "lin")]
    assert Path("jobs/lin/runs/1/etcd").exists()
    assert cleaned(capsys, "--job", "lin")[0] == "deleted jobs/lin/runs/1/etcd"
    assert cleaned(capsys, "--job", "lin") == ["freed 0 B"]
    assert cleaned(capsys, "--job", "jobs/whole", "--checkpoints")[:2] == [
        f"deleted jobs/whole/runs/1/{name}" for name in ("etcd", "checkpoints")
    ]
    assert {look_at(Path("jobs", name, "runs", "1")).state for name in ("whole", "lin")} == {"complete"}
    assert Path("jobs/begun/etcd").exists()
    result = make_job(2, passes=3, name="lin").run(quiet=True)
    assert "going on from step 8 of 12 of jobs/lin/runs/1" in capsys.readouterr().err
    end = graphft.read_weights(result.model)
    assert all(torch.equal(end[name], value) for name, value in whole.items())


def test_what_is_not_complete_or_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_job(2, name="lin").save("jobs/lin")
    Path("jobs/lin/etcd").mkdir()
    assert "the job in jobs/lin is stopped: nothing of it is deleted" in refused(capsys, "clean", "--job", "lin")
    Path("jobs/lin/model.safetensors").touch()
    make(epochs.program(), None, {"chunks": epochs.chunks(), "batch_size": 8}).job.save("jobs/run")
    for folder in ("etcd", "checkpoints"):
        Path("jobs/run", folder).mkdir()
    assert "is a Trainer's, which is never complete" in refused(capsys, "clean", "--job", "run", "--checkpoints")
    with locked(Path("jobs/lin")):
        assert main(["clean"]) == 1
    out = capsys.readouterr().out
    assert "is being run by pid" in out
    assert "jobs/run is stopped, and left alone: graphft clean --job jobs/run deletes" in out
    assert Path("jobs/lin/etcd").exists()
    note_saved(Path("jobs/run"), 6)
    assert "the checkpoints of jobs/run are gone" in refused(capsys, "clean", "--job", "run")
    Path("jobs/run/ends.jsonl").unlink()
    assert cleaned(capsys, "--job", "run")[0] == "deleted jobs/run/etcd"
    assert Path("jobs/run/checkpoints").exists()
