"""`graphft clean` of saved jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.runtime.cli import main
from graphft.runtime.process.folder_lock import locked
from tests.interchange.test_job_state import make_job
from tests.support.commands import refused


def cleaned(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert main(["clean", *options]) == 0
    return [line.split(", ")[0] for line in capsys.readouterr().out.splitlines()]


def test_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_job(2, name="lin").save("jobs/lin")
    for folder in ("etcd", "checkpoints"):
        Path("jobs/lin", folder).mkdir()
    assert cleaned(capsys) == ["freed 0 B"]
    assert "it goes on from its checkpoints" in refused(capsys, "clean", "--job", "lin", "--checkpoints")
    with locked(Path("jobs/lin")):
        assert "is starting: nothing of it is deleted" in refused(capsys, "clean", "--job", "lin")
    assert cleaned(capsys, "--job", "lin")[0] == "deleted jobs/lin/etcd"
    Path("jobs/lin/etcd").mkdir()
    Path("jobs/lin/model.safetensors").touch()
    with locked(Path("jobs/lin")):
        assert main(["clean"]) == 1
    assert "is being run by pid" in capsys.readouterr().out
    assert Path("jobs/lin/checkpoints").exists()
    assert cleaned(capsys, "--job", "lin", "--dry-run")[:-1] == ["would delete jobs/lin/etcd"]
    assert cleaned(capsys, "--job", "jobs/lin", "--checkpoints")[:2] == [
        f"deleted jobs/lin/{name}" for name in ("etcd", "checkpoints")
    ]


def test_of_old_runs_the_newest_and_the_newest_complete_one_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [Path("jobs/lin/runs", str(number)) for number in range(1, 6)]
    for run in runs:
        make_job(2, name="lin", seed=int(run.name)).save(run)
    for run in runs[:3]:
        (run / "model.safetensors").touch()
    assert cleaned(capsys, "--old-runs", "--dry-run")[:-1] == [f"would delete {runs[n]}" for n in (0, 1, 3)]
    assert cleaned(capsys, "--old-runs")[:-1] == [f"deleted {runs[n]}" for n in (0, 1, 3)]
    assert [run for run in runs if run.exists()] == [runs[2], runs[4]]
