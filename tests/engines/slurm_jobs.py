"""Jobs on a Slurm of a test's own: submitted, looked at, waited for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from graphft.runtime.coordination.status import JobStatus
from graphft.transpiler.job import Job
from tests.integration.plays import ROOT, Pace, look
from tests.support.slurm_cluster import SlurmCluster

PATIENCE = 400.0
"""Seconds until something that must happen has happened, on a machine that is busy with other things."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class SlurmJob:
    """A saved job, and what was submitted of it. `options`: of `graphft slurm`."""

    def __init__(self, cluster: SlurmCluster, job: Job, folder: Path, pace: Pace) -> None:
        self.cluster, self.folder, self.pace = cluster, folder, pace
        self.environment = {**cluster.environment, "PYTHONPATH": str(ROOT), "TMPDIR": str(cluster.folder)}
        job.save(folder)

    def submit(self, *options: str) -> str:
        """Slurm's number of it."""
        return self.submit_script(self.folder, *options)

    def submit_script(self, what: Path, *options: str) -> str:
        script = self.graphft("slurm", what, *options)
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            cwd=self.folder.parent,
        )
        return done.stdout.strip()

    def graphft(self, *arguments: str | Path) -> str:
        command = [sys.executable, "-m", "graphft", *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, cwd=self.folder.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def until(self, condition: Callable[[JobStatus], bool]) -> JobStatus:
        """Waits for a status of the job; it goes slower when it nears its end meanwhile."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            status = look(self.folder)
            if status is not None and condition(status):
                return status
            if status is not None and 3 * status.step > 2 * status.spec["total_steps"]:
                self.pace.set(Pace.SLOWEST)
            time.sleep(0.1)
        raise AssertionError(f"not seen what was waited for: {self.said()}")

    def ends(self, number: str) -> str:
        """Its last state in Slurm."""
        self.pace.set(0.01)
        end = time.monotonic() + PATIENCE
        while (state := self.cluster.job_state(number)) not in OVER:
            assert time.monotonic() < end, f"job {number} is {state}: {self.said()}"
            time.sleep(0.2)
        return state

    def leave(self) -> None:
        """Nothing of it is in Slurm afterwards."""
        end = time.monotonic() + PATIENCE
        while self.cluster.call("squeue", "--noheader"):
            self.cluster.call("scancel", "--user=root")
            assert time.monotonic() < end
            time.sleep(0.2)

    def signal(self, number: str, signum: signal.Signals, *options: str) -> None:
        self.cluster.call("scancel", f"--signal={signum.name[3:]}", *options, number)

    def said(self) -> str:
        """By the scripts, and by Slurm of them."""
        return "\n".join(
            path.read_text(errors="replace") for path in sorted((self.folder / "logs").glob("slurm-*.log"))
        )
