"""`graphft runs`: a line for each job of a folder, or below a URL."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from graphft.runtime.coordination.result_files import note_validation
from graphft.runtime.launcher.folder_status import look_at, read_run
from graphft.runtime.launcher.process_ends import note
from graphft.transpiler.criteria import Criterion
from graphft.transpiler.job import Job
from graphft.transpiler.validation import ValidationConfig
from tests.support.commands import refused, shown
from tests.support.metric_rows import write_rows

pytestmark = pytest.mark.usefixtures("own_folder")
EMPTY_MODEL = (2).to_bytes(8, "little") + b"{}"


@pytest.fixture(scope="module")
def passes(job: Job) -> Job:
    """3 passes of 4 steps."""
    return Job.make(job.source, job.config.replace(epochs=3))


def saved(job: Job, name: str, at: float, size: int = 0) -> Path:
    folder = Path("jobs", name)
    job.save(folder)
    (folder / "model.safetensors").write_bytes(EMPTY_MODEL)
    os.utime(folder / "model.safetensors", (at, at))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "part").write_bytes(os.urandom(size))
    return folder


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {row["folder"]: row for row in json.loads(shown(capsys, "runs", "--json"))}


def test_what_a_line_tells(capsys: pytest.CaptureFixture[str], passes: Job) -> None:
    folder = saved(passes, "a", at=1.0, size=1_000_000)
    write_rows(folder, [4.0, 4.0, 4.0, 4.0, 1.0, 2.0, 1.0, 2.0, 3.0, 3.0, 3.0, 2.5], accuracy=0.75)
    for epoch, loss in ((1, 4.0), (2, 1.5)):
        note_validation(folder, epoch, 4 * epoch, {"loss": loss, "accuracy": 0.75})
    for _ in range(2):
        note(folder, "launch")
    for kind in ("preemption", "failure", "preemption"):
        note(folder, kind, "died", "trainer 0")
    header, line = shown(capsys, "runs").splitlines()
    for title, cell in (
        ("folder", "jobs/a "),
        ("state", "complete "),
        ("step", "12 of 12 "),
        ("loss", "2.5 "),
        ("best", "loss 1.5 (epoch 2) "),
        ("launches", "2 "),
        ("preempted", "2 "),
        ("failed", "1 "),
        ("size", "1."),
    ):
        assert line[header.index(title) :].startswith(cell), (title, line)
    found = told(capsys)["jobs/a"]
    assert found["best"] == {"metric": "loss", "mode": "min", "value": 1.5, "epoch": 2}
    assert (found["last_loss"], found["launches"], found["failures"]) == (2.5, 2, 1)
    assert found["bytes"] >= 1_000_000
    assert "there are no jobs in" in refused(capsys, "runs", "nosuch")
    assert "is a URL" in refused(capsys, "runs", "s3://bucket/jobs")
    assert shown(capsys, "status") == shown(capsys, "runs"), "one list"


def test_the_best_is_that_of_a_validation_by_what_keeps_the_best_model(passes: Job) -> None:
    keeps = ValidationConfig(passes.config.data, 4, best=Criterion("auc"))
    folder = saved(Job.make(passes.source, passes.config.replace(validate=keeps), passes.source), "a", 1.0)
    for epoch, auc in ((1, 0.75), (2, 0.5), (3, math.nan), (1, 0.625)):  # epoch 1 was validated again
        note_validation(folder, epoch, 4 * epoch, {"loss": 2.0, "auc": auc})
    with (folder / "validation.jsonl").open("a") as file:
        file.write('{"epoch": 4, "metrics": {"loss": "x"}}\n{"epoch": 5, "met')
    found = read_run(look_at(folder))
    assert (found.criterion.metric, found.best) == ("auc", (0.625, 1))


def test_folders_that_cannot_be_read_are_lines_too(capsys: pytest.CaptureFixture[str], passes: Job) -> None:
    saved(passes, "good", 1.0)
    for name, data in (("cut", b'{"format": '), ("other", b"[]"), ("deep", b"[" * 100_000), (b"b\xff\x1byte", b"")):
        folder = Path("jobs", os.fsdecode(name))
        folder.mkdir()
        (folder / "job.json").write_bytes(data)
    Path("jobs", "loop").symlink_to("loop")
    Path("jobs", "no-job").mkdir()
    Path("jobs", "file").write_text("")
    found = told(capsys)
    assert {name: row["state"] for name, row in found.items()} == {
        "jobs/good": "complete",
        "jobs/cut": "unreadable",
        "jobs/other": "unreadable",
        "jobs/deep": "unreadable",
        "jobs/b\\udcff\\x1byte": "unreadable",
        "jobs/loop": "unreadable",
    }
    assert "\njobs/cut: cannot be read: jobs/cut/job.json is damaged: " in shown(capsys, "runs")
