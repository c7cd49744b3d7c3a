"""`graphft status`: of a job that runs, starts, stopped, is complete, or is not there; and of all that there are."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import msgspec
import pytest

from graphft.errors import GraphftError
from graphft.runtime.coordination.connect import write_endpoints
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.job_files import publish
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration, ShardStatus, TrainerStatus
from graphft.runtime.coordination.result_files import Discarded, write_discarded
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import folder_status
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.launcher.process_ends import note, note_saved
from graphft.runtime.process.folder_lock import holder_of, locked
from graphft.transpiler.job import Job
from tests.support.commands import refused, shown

NOBODY = "127.0.0.1:1"


pytestmark = pytest.mark.usefixtures("own_folder", "patient")
EMPTY_MODEL = (2).to_bytes(8, "little") + b"{}"


# -- jobs that etcd knows ---------------------------------------------------------------------------------------------


def test_a_job_whose_storage_is_away_hides_no_other(
    capsys: pytest.CaptureFixture[str], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(folder: Path) -> bool:
        if folder.name == "away":
            raise GraphftError("the storage cannot be used", rule="storage")
        return False

    for name in ("away", "here"):
        shutil.copytree(saved, f"jobs/{name}")
    monkeypatch.setattr(folder_status, "begun", away)
    lines = shown(capsys, "status").splitlines()
    states = {line.split()[0]: " ".join(line.split()[1:3]) for line in lines}
    assert states["jobs/away"].startswith("unknown")
    assert states["jobs/here"] == "not begun"


def test_status_by_name(capsys: pytest.CaptureFixture[str], etcd: Etcd, keys: Keys, job: Job) -> None:
    put_job(etcd, keys, job)
    Events(etcd, keys, "launcher").emit("died", "trainer 1 died (killed by SIGKILL), starting it again")
    endpoints = ",".join(etcd.endpoints)
    data = json.loads(shown(capsys, "status", "--job", keys.job, "--etcd", endpoints, "--json"))
    assert (data["job"], data["state"], data["step"]) == (keys.job, "running", 0)
    assert data["events"][0]["kind"] == "died"
    text = shown(capsys, "status", "--job", keys.job, "--etcd", f"http://{NOBODY}, {endpoints}")
    assert f"graphft job {keys.job}: running, but no process of it is there" in text
    assert "[launcher] trainer 1 died (killed by SIGKILL)" in text


BRIEF = {"job", "state", "step", "total_steps", "epoch", "epochs", "loss", "waiting", "failure", "folder", "etcd"}


def test_every_json_of_a_job_has_these_keys(
    capsys: pytest.CaptureFixture[str], etcd: Etcd, job: Job, keys: Keys, tmp_path: Path
) -> None:
    named, folder = Job.make(job.source, job.config.replace(name=keys.job)), tmp_path / "jobs" / keys.job
    named.save(folder)

    def told(*arguments: str) -> dict[str, object]:
        found = json.loads(shown(capsys, "status", "--json", *arguments))
        if isinstance(found, list):
            (found,) = [entry for entry in found if entry["job"] == keys.job]
        assert set(found) >= BRIEF
        return {key: found[key] for key in BRIEF - {"folder"}}

    fixed = {"job": keys.job, "total_steps": 4, "epochs": 1, "failure": "", "waiting": ""}
    begun = fixed | {"state": "not begun", "step": 0, "epoch": None, "loss": None, "etcd": ""}
    assert told("--job", keys.job) == begun == told()
    endpoints = ",".join(etcd.endpoints)
    put_job(etcd, keys, named, folder)
    put_job(etcd, Keys(f"{keys.job}-2"), named)
    write_endpoints(folder, endpoints)
    etcd.put(keys.trainer("0-a"), msgspec.json.encode(Registration("0-a", "", 1, "h")))
    etcd.put(keys.status_of("trainer", "0-a"), msgspec.json.encode(TrainerStatus(2)))
    etcd.put(keys.pserver(0), msgspec.json.encode(Registration("p", "", 2, "h")))
    etcd.put(keys.status_of("pserver", "0"), msgspec.json.encode(ShardStatus(metrics={"loss": 0.5})))
    runs = fixed | {"state": "running", "step": 0, "epoch": 0, "loss": 0.5, "etcd": endpoints}
    assert told("--job", keys.job) == told() == told("--job", keys.job, "--etcd", endpoints) == runs
    assert told("--etcd", endpoints) == runs, "in the list of all that etcd knows"
    (folder / "model.safetensors").write_bytes(EMPTY_MODEL)
    assert told() == fixed | {"state": "complete", "step": 4, "epoch": None, "loss": None, "etcd": ""}


# -- jobs of this machine ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_a_job_that_was_never_begun_stopped_or_is_complete(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    text = shown(capsys, "status", "--job", saved)
    assert text == f"the job in {saved} was saved and never begun: graphft launch --job {saved}\n"
    write_endpoints(saved, NOBODY, own=True)
    left = f"it stopped at step 0 of 4: graphft launch --job {saved} goes on with it"
    assert shown(capsys, "status", "--job", saved) == f"the job in {saved} is not running; {left}\n"
    (saved / "model.safetensors").write_bytes(EMPTY_MODEL)
    model = saved / "model.safetensors"
    assert shown(capsys, "status", "--job", saved) == f"the job in {saved} is complete: 4 steps, model {model}\n"
    data = json.loads(shown(capsys, "status", "--job", saved, "--json"))
    assert (data["state"], data["step"], data["model"], data["lost"]) == ("complete", 4, str(model), [])


def test_the_list_says_what_was_lost_and_why_a_job_failed(capsys: pytest.CaptureFixture[str], job: Job) -> None:
    for name in ("lossy", "broken"):
        job.save(Path("jobs", name))
    (Path("jobs", "lossy") / "model.safetensors").write_bytes(EMPTY_MODEL)
    write_discarded(Path("jobs", "lossy"), [Discarded(0, 1, 0, (5, 6), "KeyError: 'x'")])
    note(Path("jobs", "broken"), "launch")
    note(Path("jobs", "broken"), "failed", "trainer 1 failed\n4 times in a row\nhelp: see its log")
    (Path("jobs", "broken") / "checkpoints").mkdir()
    text = shown(capsys, "status")
    assert "\njobs/lossy: 2 of 32 records were DISCARDED" in text
    assert "\njobs/broken: failed: trainer 1 failed 4 times in a row\n" in text
    text = shown(capsys, "status", "--job", "broken")
    assert "failed at step 0 of 4: trainer 1 failed 4 times in a row; graphft launch --job jobs/broken tries" in text


def test_a_job_that_is_starting(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    assert holder_of(saved) == ""
    with locked(saved):
        holder = f"pid {os.getpid()} on host {socket.gethostname()}"
        assert holder_of(saved) == holder
        text = shown(capsys, "status", "--job", saved)
        assert text == f"the job in {saved} is starting ({holder}), at step 0 of 4\n"
    assert holder_of(saved) == ""


@pytest.mark.usefixtures("soon")
def test_a_job_whose_etcd_is_elsewhere_and_does_not_answer_may_run(
    capsys: pytest.CaptureFixture[str], saved: Path
) -> None:
    write_endpoints(saved, NOBODY)
    said = shown(capsys, "status", "--job", saved)
    assert f"may run, which is not known: its etcd {NOBODY} does not answer here; give --etcd" in said
    assert "graphft launch" not in said, "it would run the job twice"


def test_all_jobs_of_the_folder(
    capsys: pytest.CaptureFixture[str], etcd: Etcd, job: Job, keys: Keys, tmp_path: Path
) -> None:
    assert "there are no jobs in" in refused(capsys, "status")
    live = Job.make(job.source, job.config.replace(name=keys.job))
    for name, made in (("a", job), ("b", job), (keys.job, live)):
        made.save(tmp_path / "jobs" / name)
    (tmp_path / "jobs" / "a" / "model.safetensors").write_bytes(EMPTY_MODEL)
    os.utime(tmp_path / "jobs" / "a" / "model.safetensors", (1.0, 1.0))
    put_job(etcd, keys, live)
    write_endpoints(tmp_path / "jobs" / keys.job, ",".join(etcd.endpoints))
    assert look_at(tmp_path / "jobs" / keys.job).state == "stopped", "its etcd answers, and no process of it lives"
    with locked(tmp_path / "jobs" / keys.job):
        rows = [line.split()[:5] for line in shown(capsys, "status").splitlines() if line.startswith("jobs/")]
    assert rows[0] == ["jobs/a", "complete", "4", "of", "4"], "the oldest"
    assert rows[-1] == [f"jobs/{keys.job}", "starting", "0", "of", "4"], "the newest"
    assert ["jobs/b", "not", "begun", "0", "of"] in rows
    assert "--watch is for one job" in refused(capsys, "status", "--watch")


def test_a_question_by_url_makes_no_folder(capsys: pytest.CaptureFixture[str], job: Job, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/stored/linear"
    Job.make(job.source, job.config.replace(storage=url)).save(tmp_path / "first")
    publish(tmp_path / "first")
    assert f"the job in {url} was saved and never begun: graphft launch --job {url}" in shown(
        capsys, "status", "--job", url
    )
    assert not (tmp_path / "jobs").exists()


@pytest.mark.usefixtures("soon")
def test_checkpoints_that_are_gone_are_told(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    write_endpoints(saved, NOBODY, own=True)
    note_saved(saved, 2)
    assert "; its checkpoints are gone, or damaged: bring them back" in shown(capsys, "status", "--job", saved)
