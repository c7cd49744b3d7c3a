"""A job's processes and its etcd, from outside: started with the launcher, and hurt with signals."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from graphft.errors import GraphftError, plain_text
from graphft.runtime.coordination.connect import connect_role, write_endpoints
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.process.role_process import spawn
from graphft.transpiler.job import Job

START_SECONDS = 120.0
STOP_SECONDS = 20.0
DEATH_SECONDS = 30.0
LOOK_SECONDS = 0.3
"""etcd may take so long for each read of a look."""
COORDINATORS = 2
"""A job that has any has so many: one serves, one stands by."""


class Host:
    """One job on this machine, with the launcher's own etcd."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder.resolve()
        self.has_coordinator = job.config.dispatch == "coordinator"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.status: JobStatus | None = None
        """As of the last look at which etcd answered."""
        self._etcd: Etcd | None = None
        self._stopped: list[tuple[float, psutil.Process]] = []
        """Processes that are to go on, and when."""

    def launch(self) -> None:
        """Starts the launcher, and waits until its etcd answers. Raises GraphftError if it does not."""
        command = ["launch", "--quiet", "--job", str(self.folder)]
        if self.has_coordinator:
            command += ["--coordinators", str(COORDINATORS)]
        write_endpoints(self.folder, "")
        log = self.folder / "logs" / "launcher.log"
        self.launcher = spawn(command, log, {})
        end = time.monotonic() + START_SECONDS
        while self._etcd is None:
            try:
                self._etcd = connect_role(self.folder, wait=0.5)
            except GraphftError as error:
                if self.launcher.poll() is not None:
                    raise GraphftError(
                        f"its launcher ended at once: {plain_text(log.read_text(errors='replace').strip())}",
                        rule="job-failed",
                        help="see what the launcher says",
                    ) from error
                if time.monotonic() > end:
                    raise

    def step(self) -> int | None:
        """Does what is due, and looks at the job. Returns the launcher's exit status once it has ended."""
        assert self.launcher is not None
        assert self._etcd is not None
        now = time.monotonic()
        for _, process in (timer for timer in self._stopped if timer[0] <= now):
            send(process, signal.SIGCONT)
        self._stopped = [timer for timer in self._stopped if timer[0] > now]
        with contextlib.suppress(GraphftError):  # etcd is away, or knows nothing of the job so far
            self.status = read_status(self._etcd, Keys(self.job.config.name), LOOK_SECONDS, brief=True)
        return self.launcher.poll()

    def stop_for(self, process: psutil.Process, seconds: float) -> None:
        """Sends SIGSTOP, and SIGCONT after so long."""
        send(process, signal.SIGSTOP)
        self._stopped.append((time.monotonic() + seconds, process))

    def close(self) -> None:
        """Ends everything that still runs."""
        self._forget()
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.terminate()
            try:
                self.launcher.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()

    def _forget(self) -> None:
        """Ends the connection to etcd."""
        if self._etcd is not None:
            self._etcd.close()
        self._etcd, self.status = None, None

    def members(self, role: str) -> list[tuple[str, psutil.Process]]:
        """Returns the ids and processes of those of a role that are registered and alive; of coordinators the one that
        serves first."""
        status = self.status
        if status is None:
            return []
        told: list[dict[str, Any]] = list(getattr(status, f"{role}s").values())
        told.sort(key=lambda one: (not one.get("serving"), one["id"]))
        found = [(one["id"], self._process(one["pid"])) for one in told]
        return [(name, process) for name, process in found if process is not None]

    def _process(self, pid: int) -> psutil.Process | None:
        """Returns the job's process of this id; None if there is none (any more)."""
        try:
            process = psutil.Process(pid)
            return process if any(str(self.folder) in part for part in process.cmdline()) else None
        except psutil.Error:
            return None

    def etcd(self) -> list[tuple[str, psutil.Process]]:
        """Returns the launcher's etcd, if it runs."""
        assert self.launcher is not None
        return [("etcd", p) for p in psutil.Process(self.launcher.pid).children() if _is_etcd(p)]

    def kill_all(self) -> None:
        """Kills the launcher, with which its roles and its etcd die; then launches the job again, in the folder
        that it left."""
        assert self.launcher is not None
        roles = psutil.Process(self.launcher.pid).children(recursive=True)
        self.launcher.kill()
        self.launcher.wait()
        self._forget()
        self._stopped.clear()
        _, left = psutil.wait_procs(roles, timeout=DEATH_SECONDS)
        if left:
            raise GraphftError(
                f"{len(left)} processes outlived the launcher: {left}",
                rule="chaos",
                help="roles and etcd are to die with the process that started them",
            )
        self.launch()

    def tell_stories(self) -> None:
        """Has every role write its story, and where its threads are, into its log."""
        for role in ("coordinator", "pserver", "trainer"):
            for _, process in self.members(role):
                send(process, signal.SIGCONT)
                send(process, signal.SIGUSR1)


def send(process: psutil.Process, signum: int) -> None:
    """Sends a signal, if the process (and not another of its id) still runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _is_etcd(process: psutil.Process) -> bool:
    try:
        return any(part.startswith("--data-dir=") for part in process.cmdline())
    except psutil.Error:
        return False
