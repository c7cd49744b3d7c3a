"""The engine of this machine: roles are forks of the fork server, or are started from nothing.

The fork server is a process that has imported everything and loaded the job.
To start Python, torch and the job takes a second or two of a core for each role. The launcher does it once, while etcd
starts; a role that is started (again) then exists a few hundredths of a second later, and shares what was loaded.

A role's parent is the launcher, not the fork server, which forks twice: the launcher adopts orphans (Linux's
PR_SET_CHILD_SUBREAPER), waits for a role's end as for any child's, and does not depend on the fork server's life. The
fork server has one thread, and starts nothing of etcd, ZeroMQ or torch's pools: a fork inherits nothing half done.

A fork server that is stopped, or hangs, is killed when an order has waited too long, together with what it was about
to make, so that no role exists twice: it and its forks are a process group, which a role leaves only after it has
reported itself to the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, Order, Process, Run
from graphft.runtime.process.identity import identify
from graphft.runtime.process.role_process import (
    ERROR_LINES,
    EXIT_FAILED,
    EXIT_USAGE,
    error_in,
    last_lines,
    spawn,
    start_role,
)

log = logging.getLogger("graphft")

_PR_SET_CHILD_SUBREAPER = 36
MADE_SECONDS = 10.0
"""A signal waits for so long for a role that is being made."""
ANSWER_SECONDS = 120.0
"""An order may wait for so long: the fork server may still be loading the job."""
END_SECONDS = 5.0
"""The end of a killed process is waited for so long: only the kernel can keep it from ending."""


class Forked(Process):
    """A role that the fork server makes."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.asked_at = time.monotonic()
        self._waiting = threading.Lock()

    def made(self, pid: int) -> None:
        """0: it will never exist, for the fork server is dead."""
        if not pid:
            self.end(EXIT_FAILED)
            return
        self.pid, self.identity = pid, identify(pid)
        self._made.set()

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            return super().wait(timeout)
        self._made.wait()
        with self._waiting:
            status = self._status if self._status is not None else _await_end(self.pid)
            self.end(status)
        return status

    def send_signal(self, signum: int) -> None:
        if self._made.wait(MADE_SECONDS) and self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def _await_end(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # it was killed with its fork server, and collected with what that had not told of
        return -signal.SIGKILL


class ForkServer:
    """The launcher's end."""

    def __init__(self, job_dir: Path, environment: Mapping[str, str]) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._asked: dict[int, Forked] = {}
        """Orders that have not been carried out, by their ids, oldest first."""
        self._ids = count()
        self._lock = threading.Lock()
        self.alive = True
        # numpy's pool of threads would be in the fork's way, and is of no use to a role.
        self.process = spawn(
            ["fork-server", "--job", str(job_dir)],
            job_dir / "logs" / "fork-server.log",
            {**environment, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)  # one that does not read must not stop the launcher
        self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
        self._reader.start()

    def fork(self, order: Order, log: Path) -> Forked:
        """Has the role made; its output goes to `log`. Raises OSError if the fork server is dead."""
        with self._lock:
            if not self.alive:
                raise BrokenPipeError("the fork server is dead")
            number = next(self._ids)
            wanted = {"id": number, "role": order.role, "index": order.index, "etcd": order.etcd, "log": str(log)}
            line = json.dumps(wanted).encode() + b"\n"
            assert self.process.stdin is not None
            if os.write(self.process.stdin.fileno(), line) < len(line):
                raise BrokenPipeError("the fork server does not read its orders")
            forked = self._asked[number] = Forked(order)
        return forked

    @property
    def stuck(self) -> bool:
        """True if an order has waited for too long: the fork server is stopped, or hangs."""
        with self._lock:
            oldest = next(iter(self._asked.values()), None)
        return oldest is not None and time.monotonic() - oldest.asked_at > ANSWER_SECONDS

    def close(self) -> None:
        """Ends it, and what it has not reported; what it was asked for and has not made will never exist."""
        self.process.kill()
        if self.alive:
            self._kill_group()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _read(self) -> None:
        """Takes in the process ids of what was made."""
        assert self.process.stdout is not None
        with self.process.stdout as made:
            for line in made:
                number, pid = map(int, line.split())
                with self._lock:
                    forked = self._asked.pop(number)
                forked.made(pid)
        self._kill_group()  # if it died by itself: what it was about to make
        self.process.wait()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self.process.pid, 0)
        with self._lock:
            self.alive, left, self._asked = False, self._asked, {}
        for forked in left.values():
            forked.made(0)

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):  # it had not begun its group, or nothing is left of that
            os.killpg(self.process.pid, signal.SIGKILL)


class Started(Process):
    """A role that was started from nothing."""

    def __init__(self, order: Order, process: subprocess.Popen[bytes]) -> None:
        super().__init__(order)
        self.process, self.pid, self.identity = process, process.pid, identify(process.pid)
        self._made.set()

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    def send_signal(self, signum: int) -> None:
        self.process.send_signal(signum)


@dataclass(frozen=True, slots=True)
class Local:
    """This machine. `fork_server`: roles are forks of a process that has loaded the job already."""

    fork_server: bool = True

    def open(self, run: Run) -> Engine:
        if run.resources:
            log.warning("resources= are not looked at: the processes run on this machine, as it is")
        return LocalEngine(run, fork_server=self.fork_server)


class LocalEngine(Engine):
    """`fork_server`: see `Local`."""

    def __init__(self, run: Run, *, fork_server: bool = True) -> None:
        super().__init__(run)
        self._forks = fork_server
        self._fork_server: ForkServer | None = None

    def prepare(self) -> None:
        if self._forks and self._fork_server is None:
            self._fork_server = ForkServer(self.run.job_dir, self.run.environment)

    def start(self, order: Order) -> Process:
        log_file = self.run.log(order)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        process: Process | None = None
        if self._fork_server is not None:
            try:
                process = self._fork_server.fork(order, log_file)
            except OSError:
                self._drop_fork_server(self._fork_server, "is dead")
        if process is None:
            arguments = [order.role, "--job", str(self.run.job_dir), "--etcd", order.etcd, "--index", str(order.index)]
            process = Started(order, start_role(arguments, log_file, self.run.environment))
        self._processes = [p for p in self._processes if p.poll() is None] + [process]
        return process

    def step(self) -> None:
        if self._fork_server is not None and self._fork_server.stuck:
            self._drop_fork_server(self._fork_server, "does not answer, killing it")

    def cancel_orders(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    def close(self) -> None:
        self.cancel_orders()

    def _drop_fork_server(self, fork_server: ForkServer, why: str) -> None:
        """Ends it: from now on roles are started from nothing. Raises UsageError if it found that the job cannot be
        loaded: no role could load it either."""
        log_file = self.run.job_dir / "logs" / "fork-server.log"
        useless = fork_server.process.poll() == EXIT_USAGE
        fork_server.close()
        self._fork_server = None
        if useless:
            raise UsageError(f"it cannot be loaded{error_in(last_lines(log_file, ERROR_LINES))}", rule="job-directory")
        log.warning("the fork server %s: roles start more slowly from now on; see %s", why, log_file)
