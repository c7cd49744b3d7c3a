"""Launches end that do not complete: with words, a status, and an exception."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import graphft
from graphft.errors import GraphftError
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.ending import Reached
from graphft.transpiler.job import Job
from tests.support.scripts import run


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_in_order_with_one_line_and_its_status(name: str, status: int) -> None:
    done = run(
        "import os, signal\n"
        "from graphft.runtime.launcher.ending import interruptible\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what a shell starts behind & ignores it
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # so does nohup
        "with interruptible(lambda: 'interrupted at step 3'):\n"
        "    try:\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('etcd has ended')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "etcd has ended\n", "interrupted at step 3\n")


@pytest.mark.parametrize(("debug", "traceback"), [("", False), ("1", True)])
def test_an_error_of_a_launch_is_a_message_without_a_traceback(debug: str, traceback: bool) -> None:
    done = run(
        "from graphft.errors import UsageError, without_traceback\n"
        "try:\n"
        "    raise UsageError('no usable etcd was found', rule='etcd-missing', help='install it')\n"
        "except UsageError as error:\n"
        "    without_traceback(error)\n"
        "    raise\n",
        GRAPHFT_DEBUG=debug,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("error[etcd-missing]: no usable etcd was found\nhelp: install it\n")
    assert ("Traceback" in done.stderr) == traceback


def test_the_last_words(job: Job, saved: Path) -> None:
    reached = Reached(saved, job.config)
    assert reached.describe() == f"interrupted; run again to resume {saved}"
    reached.look(JobStatus("j", "running", {}, 0, 0, 3, 2))
    assert reached.describe() == f"interrupted at step 3 of 4; run again to resume {saved} at step 2 of 4"
    plain = Reached(saved, job.config.replace(ft=False), reached.status)
    assert plain.describe().startswith("interrupted at step 3 of 4; without fault tolerance (ft=False)")
    reached.look(JobStatus("j", "complete", {}, 0, 0, 4, 4))
    assert reached.describe() == f"interrupted at step 4 of 4; {saved} is complete"


def test_a_script_that_runs_its_job_when_it_is_imported_is_told_of_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("GRAPHFT_CALLED", "")
    script = tmp_path / "unguarded.py"
    script.write_text("from graphft.runtime.launcher.launch import run_job\n\nrun_job(None)\n\n\ndef make(): ...\n")
    with pytest.raises(GraphftError, match=r"unguarded\.py calls job\.run\(\) when it is imported") as caught:
        graphft.dataset(f"{script}:make")
    assert caught.value.rule == "main-guard"
    assert "if __name__ == '__main__':" in caught.value.help
