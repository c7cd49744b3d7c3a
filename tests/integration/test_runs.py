"""Several runs of one script: on one etcd, in one folder, and after the script was corrected."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.launcher.process_ends import read_ends
from graphft.runtime.process.role_process import EXIT_USAGE
from tests.integration import training
from tests.integration.plays import SCRIPT, Pace, Program, at, kill_first, play

pytestmark = pytest.mark.timeout(600)
OPTIONS = {"trainers": 2, "pservers": 1, "passes": 1}
PATIENT = {**OPTIONS, "chunk_timeout": 200}
"""Where a batch takes half a minute: a trainer that has no CPU for the other half is not to end."""


def model(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def launch_with(etcd: str, **options: int) -> str:
    return json.dumps({"etcd": etcd, "quiet": True, **options})


@pytest.mark.slow
def test_two_users_of_one_etcd_do_not_train_each_others_model(program: ir.Program, folder: Path, pace: Pace) -> None:
    """The same script, name and etcd, other data (`records`); roles by hand and by the launcher."""
    pace.set(30)
    with EmbeddedEtcd(folder / "etcd") as server:
        etcd = server.endpoints[0]
        launch = {"GRAPHFT_LAUNCH": launch_with(etcd)}
        one = Program(folder / "one", SCRIPT, pace.file, json.dumps(PATIENT), **launch)
        begun = folder / "one" / "jobs" / "blobs" / "runs" / "1"
        one.until(begun, lambda s: bool(s.trainers), etcd=etcd)
        other = Program(folder / "other", SCRIPT, pace.file, json.dumps(PATIENT), **launch)
        assert other.wait() == 1
        assert "etcd has another run named blobs" in other.output
        assert f"in {begun} on {socket.gethostname()}" in other.output
        stranger = training.job(program, pace=pace.file, **{**PATIENT, "seed": 5})
        stranger.save(folder / "stranger")
        start = ("-m", "graphft", "start", "--job", folder / "stranger", "--etcd", etcd)
        for by_hand in [Program(folder, *start, role) for role in ("trainer", "pserver", "coordinator")]:
            assert (by_hand.wait(), "error[foreign-job]" in by_hand.output) == (EXIT_USAGE, True), by_hand.output
        joined = Program(
            folder / "one", SCRIPT, pace.file, json.dumps(PATIENT), GRAPHFT_LAUNCH=launch_with(etcd, pservers=0)
        )
        joined.says("resuming jobs/blobs/runs/1 at step")
        pace.set(0)
        assert one.wait() == 0, one.output
        assert joined.wait() == 0, joined.output
        late = Program(folder, "-m", "graphft", "start", "pserver", "--job", begun.parent.parent, "--etcd", etcd)
        assert late.wait() == 0, "a pserver that comes when the job is complete changes nothing"
        with Etcd([etcd]) as client:
            state = client.get(Keys("blobs").state)
            assert state is not None
            assert state.value == b"complete"
        # The run that is over makes way.
        after = play(training.job(program, pace=pace.file, **PATIENT), folder / "after", etcd=etcd)
    assert model(begun) == model(after.folder), "the bits of an undisturbed run"


@pytest.mark.slow
def test_a_model_that_is_gone_is_made_again(program: ir.Program, folder: Path) -> None:
    """Its etcd said that the job is complete: it "completed" once more each time, with status 0 and no model."""
    job_dir = play(training.job(program, **OPTIONS), folder).folder
    (before, model_file), launch = (model(job_dir), job_dir / "model.safetensors"), ("-m", "graphft", "launch", "--job")
    model_file.unlink()
    status = Program(folder, "-m", "graphft", "status", "--job", job_dir)
    assert status.wait() == 0
    assert "writes its model, which is not there" in status.output
    again = Program(folder, *launch, job_dir)
    assert again.wait() == 0, again.output
    assert "is gone: it is made again, from the checkpoint of step" in again.output
    assert model(job_dir) == before
    model_file.unlink()
    for manifest in job_dir.glob("checkpoints/**/manifest.json"):
        manifest.unlink()
    anew = Program(folder, *launch, job_dir)
    assert anew.wait() == 0, anew.output
    assert "is gone: it is TRAINED again" in anew.output
    assert model(job_dir) == before


@pytest.mark.slow
def test_a_second_launcher_in_a_folder_leaves_it_alone(folder: Path, pace: Pace) -> None:
    """Without fault tolerance it deleted the etcd and the metrics of the job that was running there."""
    pace.set(2)
    options = json.dumps({**OPTIONS, "ft": False})
    first = Program(folder, SCRIPT, pace.file, options, GRAPHFT_LAUNCH='{"quiet": true}')
    job_dir = folder / "jobs" / "blobs" / "runs" / "1"
    first.until(job_dir, lambda s: bool(s.trainers))
    second = Program(folder, SCRIPT, pace.file, options, GRAPHFT_LAUNCH='{"quiet": true, "wait": false}')
    patient = Program(folder, SCRIPT, pace.file, options, GRAPHFT_LAUNCH='{"quiet": true}')
    holder = f"pid {first.process.pid} on host {socket.gethostname()}"
    assert second.wait() == 1
    assert second.output.startswith(f"error[job-running]: the job in jobs/blobs/runs/1 is being run by {holder}\n")
    assert "Traceback" not in second.output
    patient.says(f"jobs/blobs/runs/1 is being run by {holder}; waiting (--no-wait or wait=False: an error)")
    pace.set(0)
    assert first.wait() == 0, first.output
    assert (job_dir / "metrics.rows").exists()
    assert patient.wait() == 0, patient.output
    assert f"jobs/blobs/runs/1 was completed by {holder}\n" in patient.output
    losses = [program.output.splitlines()[-1] for program in (first, patient)]
    assert losses[0] == losses[1], "the result of the run that was waited for"
    assert not (folder / "jobs" / "blobs" / "runs" / "2").exists()


def test_a_corrected_script_does_not_go_on_with_the_old_run(folder: Path, pace: Pace) -> None:
    """Other data under the same options begin a run of their own; the unchanged script goes on."""
    arguments = (SCRIPT, pace.file)
    launch = {"GRAPHFT_LAUNCH": '{"quiet": true}'}
    begun = folder / "jobs" / "blobs" / "runs" / "1"
    first = Program(folder, *arguments, json.dumps(OPTIONS), **launch)
    first.until(
        folder / "jobs" / "blobs" / "runs" / "1",
        lambda s: at(12)(s) and (s.checkpoint or 0) >= 10 and kill_first(s.trainers),
    )
    first.until(begun, lambda s: any(e.kind == "died" for e in s.events))
    first.kill()
    pace.set(0)
    again = Program(folder, *arguments, json.dumps(OPTIONS), **launch)
    assert again.wait() == 0, again.output
    assert re.match(r"resuming jobs/blobs/runs/1 at step [1-5]0 of \d+\n", again.output), again.output
    mended = Program(folder, *arguments, json.dumps({**OPTIONS, "blobs": {"mislabeled": 444}}), **launch)
    assert mended.wait() == 0, mended.output
    assert mended.output.startswith("jobs/blobs/runs/1 differs in: ")
    assert "; new run in jobs/blobs/runs/2\n" in mended.output
    assert model(folder / "jobs" / "blobs") == model(folder / "jobs" / "blobs" / "runs" / "2")
    assert (folder / "jobs" / "blobs" / "runs" / "1" / "model.safetensors").exists()
    ends = read_ends(folder / "jobs" / "blobs" / "runs" / "1")
    assert (ends.launches, ends.failures) == (2, {})
    assert sum(ends.preemptions.values()) >= 1, "of all launches; on a busy machine others may lose their leases"
    log = (folder / "jobs" / "blobs" / "runs" / "1" / "logs" / "pserver-0.log").read_text()
    assert re.search("goes on from step [1-5]0", log), log
