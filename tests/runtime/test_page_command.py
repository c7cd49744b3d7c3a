"""`graphft page`, and the options of a launch: which job is shown, and what is refused before anything begins."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from graphft.errors import UsageError
from graphft.runtime.callbacks.runner import Cursor
from graphft.runtime.cli import main
from graphft.runtime.coordination.connect import write_endpoints
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration, ShardStatus, TrainerStatus
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.status import read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.options import LaunchOptions
from graphft.runtime.launcher.page_command import page_of
from graphft.runtime.launcher.process_ends import note
from graphft.runtime.page.job_page import JobPage
from graphft.runtime.page.server import answer
from graphft.runtime.page.time_keeper import TimeKeeper
from graphft.transpiler.job import Job
from graphft.transpiler.record import read_record
from tests.support.commands import refused, shown

pytestmark = pytest.mark.usefixtures("own_folder", "patient")


def told(found: JobPage, path: str = "/status.json") -> dict:  # type: ignore[type-arg]
    code, _, body = answer(found, path)
    assert code == 200, body
    return dict(json.loads(body))


@pytest.fixture
def running(etcd: Etcd, keys: Keys, job: Job, tmp_path: Path) -> Path:
    """The folder of a job that runs in an etcd of the user's."""
    named = Job.make(job.source, job.config.replace(name=keys.job))
    named.save(tmp_path / "running")
    put_job(etcd, keys, named, tmp_path / "running")
    write_endpoints(tmp_path / "running", ",".join(etcd.endpoints))
    etcd.put(keys.trainer("0-a"), msgspec.json.encode(Registration("0-a", "", 1, "host")))
    etcd.put(keys.status_of("trainer", "0-a"), msgspec.json.encode(TrainerStatus(2)))
    for index in range(job.config.pservers):
        etcd.put(keys.pserver(index), msgspec.json.encode(Registration(f"p{index}", "", 2, "host")))
    etcd.put(keys.status_of("pserver", "0"), msgspec.json.encode(ShardStatus(0, metrics={"loss": 0.5})))
    Events(etcd, keys, "launcher").emit("died", "trainer 1 died (killed by SIGKILL)")
    return tmp_path / "running"


def test_page_metrics_and_status_of_a_job_that_runs(
    running: Path, keys: Keys, etcd: Etcd, capsys: pytest.CaptureFixture[str]
) -> None:
    first = told(page_of(str(running)))
    assert (first["state"], first["loss"], first["events"][0]["kind"]) == ("running", 0.5, "died")
    assert first["time"]["by_page"], "no launcher keeps its time: the page does, from now on"
    now = [1e9]
    keeper = TimeKeeper(running, read_record(running).run_id, now[0], 0, lambda: now[0])
    for step in (0, 1, 2):
        keeper.look(replace(read_status(etcd, keys, brief=True), step=step))
        now[0] += 37.0
    assert keeper.left() == 74.0, "two steps of 37 s"
    keeper.write()
    found = page_of(str(running))
    assert told(found)["time"]["seconds_left"] == 74.0
    assert b'graphft_seconds_left{job="%b"} 74.0' % keys.job.encode() in answer(found, "/metrics")[2]
    assert json.loads(shown(capsys, "status", "--job", running, "--json"))["seconds_left"] == 74.0
    assert "74 s left" in shown(capsys, "status", "--job", running)


def test_without_a_name_it_is_the_job_that_was_worked_on_last(saved: Path) -> None:
    Path("jobs").mkdir()
    shutil.copytree(saved, "jobs/two one")
    saved.rename("jobs/one")
    note(Path("jobs/two one"), "launch")
    assert told(page_of(""))["folder"] == "jobs/two one"


def test_what_page_refuses(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    assert "there are no jobs in" in refused(capsys, "page")
    assert "there is no job nosuch" in refused(capsys, "page", "--job", "nosuch")
    with pytest.raises(SystemExit):
        main(["page", "--job", str(saved), "--port=65536"])
    with pytest.raises(UsageError, match="expected True or a port"):
        LaunchOptions(page=65536)


def test_a_launch_whose_port_is_taken_begins_nothing(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    Cursor(read_record(saved).run_id, 3, 0).write(saved)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["launch", "--page-port", str(taken.getsockname()[1]), "--job", str(saved)]) == 2
    error = capsys.readouterr().err
    assert "the page cannot be served" in error
    assert "are NOT called here: run that script" in error
    assert not (saved / "etcd.json").exists()
    assert not (saved / "ends.jsonl").exists()
