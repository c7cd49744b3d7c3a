"""One `srun` that runs one process of a role, to be used like a `subprocess.Popen`.

The thread that starts srun waits for it: a child that ends with its parent ends with the parent's thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from graphft.runtime.engines.base import Order
from graphft.runtime.engines.slurm_task import Begun, Ended
from graphft.runtime.etcd.child import WRAPPER
from graphft.runtime.process.identity import UNKNOWN, Identity
from graphft.runtime.process.role_process import EXIT_LEASE_LOST

T = TypeVar("T")
WAITING = "waiting for a node"
KILL_SECONDS = 5.0
"""For how long a step may take to end after SIGKILL. One whose node is lost does not: srun is ended then, and the role,
if it lives, has lost its lease."""

QUEUE_SECONDS = 10.0
"""In which Slurm takes what is to wait in its queue before others."""


class SlurmStep:
    """A role on one of Slurm's nodes, or the wish for one. Its output is appended to `log`. `after`: others that are to
    be in Slurm's queue before it."""

    def __init__(
        self,
        order: Order,
        srun: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        after: Sequence[SlurmStep] = (),
    ) -> None:
        self.order, self._environment = order, environment
        self.pid = 0
        self.identity: Identity = UNKNOWN
        self.place = WAITING
        self.refused = ""
        """Why Slurm has never begun it; "" if it has, if it may do so still, or if the order was taken back."""
        self._step = ""
        self._status: int | None = None
        self._killed_at: float | None = None
        self._srun: subprocess.Popen[bytes] | None = None
        self._spawning = threading.Lock()
        self._began, self._ended = threading.Event(), threading.Event()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.open("ab").close()
        threading.Thread(target=self._run, args=(srun, log, after), name=f"srun {order.name}", daemon=True).start()

    def await_made(self) -> Identity:
        self._began.wait()
        return self.identity

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"srun of {self.order.name}", timeout or 0.0)
        assert self._status is not None
        return self._status

    def send_signal(self, signum: int) -> None:
        """srun hands on no SIGTERM: it ends its step by it, or takes the order back. Other signals go by scancel."""
        if self._status is not None:
            return
        if self._step and signum != signal.SIGKILL:
            arguments = (signum, self._step, self._environment)
            threading.Thread(target=_scancel, args=arguments, daemon=True).start()
        elif signum in (signal.SIGKILL, signal.SIGTERM):
            self._killed_at = self._killed_at or time.monotonic()
            self._signal_srun(signal.SIGTERM)

    def take_back(self) -> None:
        """Ends it if it has not begun."""
        if not self._step:
            self.send_signal(signal.SIGKILL)

    def give_up(self, seconds: float = KILL_SECONDS) -> None:
        """Ends an srun that waits in vain for its killed step."""
        if self._status is None and self._killed_at is not None and time.monotonic() > self._killed_at + seconds:
            self._signal_srun(signal.SIGKILL)

    def _signal_srun(self, signum: int) -> None:
        with self._spawning:
            if self._srun is not None:
                self._srun.send_signal(signum)

    def _run(self, srun: Sequence[str], log: Path, after: Sequence[SlurmStep]) -> None:
        end, status = time.monotonic() + QUEUE_SECONDS, EXIT_LEASE_LOST
        for other in after:
            other._began.wait(max(0.0, end - time.monotonic()))
        try:
            status = self._await_end(srun, log)
        except OSError as error:
            self.refused = str(error)
        finally:
            self._status = status
            self._began.set()
            self._ended.set()

    def _await_end(self, srun: Sequence[str], log: Path) -> int:
        """Of the role; EXIT_LEASE_LOST if it was never begun."""
        with self._spawning, log.open("ab") as out:
            if self._killed_at is not None:
                return EXIT_LEASE_LOST
            said_from = out.tell()
            started = self._srun = _spawn(srun, self._environment, out.fileno())
        begun, ended = self._read(started)
        started.wait()
        if begun is not None:
            return ended.status if ended is not None else -signal.SIGKILL
        if self._killed_at is None:
            self.refused = _said(log, said_from) or f"srun ended with status {started.returncode}"
        return EXIT_LEASE_LOST

    def _read(self, srun: subprocess.Popen[bytes]) -> tuple[Begun | None, Ended | None]:
        """What `slurm_task` tells. Returns when the step, or srun, has ended."""
        assert srun.stdout is not None
        with srun.stdout as told:
            begun = _decode(told.readline(), Begun)
            if begun is not None:
                self.identity, self.pid, self.place, self._step = begun.process, begun.pid, begun.node, begun.step
                self._began.set()
            ended = _decode(told.readline(), Ended)
            while told.readline():
                pass
        return begun, ended


def _spawn(srun: Sequence[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Not in this terminal's session: Ctrl-C is the launcher's. srun ends its step when it is killed."""
    tied = [sys.executable, "-I", "-S", "-c", WRAPPER, str(os.getpid())] if sys.platform == "linux" else []
    return subprocess.Popen(
        [*tied, *srun],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=output,
        env=dict(environment),
        start_new_session=True,
    )


def _scancel(signum: int, step: str, environment: Mapping[str, str]) -> None:
    """It asks Slurm's controller, which may take a while."""
    command = ["scancel", f"--signal={signal.Signals(signum).name[3:]}", step]
    subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(environment), check=False)


def _decode(line: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _said(log: Path, start: int) -> str:
    """srun's last error."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("srun: error: ")] or lines
    return errors[-1].removeprefix("srun: error: ") if errors else ""
