"""Several runs of one script: on one etcd, in one folder, and after the script was corrected."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.launcher.process_ends import read_ends
from tests.integration import training
from tests.integration.plays import ROOT, RUN, SCRIPT, Pace, Program, at, kill_first

pytestmark = pytest.mark.timeout(600)
OPTIONS = {"trainers": 2, "pservers": 1, "epochs": 1}


def model(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_second_launcher_in_a_folder_leaves_it_alone(folder: Path, pace: Pace) -> None:
    """It once deleted the etcd and the metrics of a job without fault tolerance that was running there."""
    pace.set(2)
    options = json.dumps({**OPTIONS, "ft": False})
    first = Program(folder, SCRIPT, pace.file, options, GRAPHFT_LAUNCH='{"quiet": true}')
    job_dir = folder / RUN
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
    begun = folder / RUN
    first = Program(folder, *arguments, json.dumps(OPTIONS), **launch)
    first.until(begun, lambda s: at(12)(s) and (s.checkpoint or 0) >= 10 and kill_first(s.trainers))
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
    assert (begun / "model.safetensors").exists()
    ends = read_ends(begun)
    assert (ends.launches, ends.failures) == (2, {})
    assert sum(ends.preemptions.values()) >= 1, "of all launches; on a busy machine others may lose their leases"
    log = (begun / "logs" / "pserver-0.log").read_text()
    assert re.search("goes on from step [1-5]0", log), log


@pytest.mark.slow
def test_output_that_cannot_be_written_ends_nothing(program: ir.Program, tmp_path: Path) -> None:
    training.job(program, **OPTIONS).save(tmp_path / "job")
    command = [sys.executable, "-m", "graphft", "launch", "--job", tmp_path / "job"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=full, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
    assert (tmp_path / "job" / "model.safetensors").exists()
