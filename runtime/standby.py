"""The standby: a process that has imported everything and loaded the job, and of which every role is a fork.

Starting Python, torch and the job takes a second or two of a core, for each role. The launcher has it done once, while
etcd starts; a role that is to be (again) then exists a few hundredths of a second later, and shares what was loaded.

A role's parent is the launcher, not the standby (which forks twice, and the launcher adopts orphans: Linux's
PR_SET_CHILD_SUBREAPER). So it waits for a role's end as for any child's, and nothing hangs on the standby's life. That
has one thread, and nothing of etcd, ZeroMQ or torch's pools is begun in it: a fork finds nothing that it could tear.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphft.runtime.process import EXIT_FAILED, EXIT_OK, die_with_parent, spawn

SUPPORTED = sys.platform.startswith("linux")
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
MADE_SECONDS = 10.0
"""So long a signal waits for a role that is being made."""


class Forked:
    """A role that the standby makes. To be used like a `subprocess.Popen`; `pid` is 0 until it exists."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._made, self._ended = threading.Event(), threading.Event()
        self._waiting = threading.Lock()

    def made(self, pid: int) -> None:
        """0: it will never exist, for the standby is dead."""
        self.pid = pid
        if not pid:
            self.returncode = EXIT_FAILED
            self._ended.set()
        self._made.set()

    def poll(self) -> int | None:
        """As of the last `wait`: somebody is to wait for it all the time."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"role {self.pid}", timeout)
        self._made.wait()
        with self._waiting:
            if self.returncode is None:
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
                self._ended.set()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self._made.wait(MADE_SECONDS) and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Standby:
    """The launcher's end."""

    def __init__(self, job_dir: Path, environment: Mapping[str, str]) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._asked: deque[Forked] = deque()
        self._lock = threading.Lock()
        self.alive = True
        # numpy's pool of threads would be in the fork's way, and is of no use to a role.
        self.process = spawn(["standby", "--job", str(job_dir)], job_dir / "logs" / "standby.log",
                             {**environment, "OPENBLAS_NUM_THREADS": "1"}, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, name="standby", daemon=True)
        self._reader.start()

    def fork(self, role: str, index: int, etcd: str, log: Path) -> Forked:
        """Has the role made; its output goes to `log`. Raises OSError if the standby is dead."""
        order = json.dumps({"role": role, "index": index, "etcd": etcd, "log": str(log)})
        with self._lock:
            if not self.alive:
                raise BrokenPipeError("the standby is dead")
            forked = Forked()
            self._asked.append(forked)
            assert self.process.stdin is not None
            self.process.stdin.write(order.encode() + b"\n")
            self.process.stdin.flush()
        return forked

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # an order that it did not live to read
            self.process.stdin.close()

    def _read(self) -> None:
        """Takes in the process ids of what was made, in the order in which it was asked for."""
        assert self.process.stdout is not None
        with self.process.stdout as made:
            for line in made:
                self._asked.popleft().made(int(line))
        self.process.wait()
        with self._lock:
            self.alive = False
            while self._asked:
                self._asked.popleft().made(0)


def serve(job_dir: Path) -> int:
    """The standby's end: loads everything, and makes roles. In each of them it returns the role's exit status."""
    launcher, answers = os.getppid(), os.dup(1)
    os.dup2(2, 1)
    import torch

    from graphft.runtime.roles import pserver_sync, trainer_sync  # noqa: F401  (that they are loaded is the point)
    from graphft.runtime.roles.environment import RoleSpec, run_role
    from graphft.transpiler import Job

    torch.set_num_threads(1)  # a pool that loading the job starts would not survive the fork
    job = Job.load(job_dir)
    gc.collect()
    gc.freeze()  # or each role's first collection would write to every page, and share none
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if _fork(launcher, answers):
            _become(order, answers)
            return run_role(job, job_dir, RoleSpec(order["role"], order["index"], str(job_dir), order["etcd"]))
    return EXIT_OK  # the launcher has ended


def _fork(launcher: int, answers: int) -> bool:
    """Makes a child of the launcher, and tells its id. Returns whether this is the child."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"cannot fork with {threads} threads")
    read, write = os.pipe()
    between = os.fork()
    if between:
        os.close(write)
        os.waitpid(between, 0)  # from here on its child is the launcher's
        with open(read, "rb") as told:
            os.write(answers, told.read() + b"\n")
        return False
    between = os.getpid()
    child = os.fork()
    if child:
        os.write(write, str(child).encode())
        os._exit(EXIT_OK)
    os.close(read)
    os.close(write)
    while os.getppid() == between:
        time.sleep(0.0005)
    die_with_parent(launcher)
    return True


def _become(order: Mapping[str, Any], answers: int) -> None:
    os.close(answers)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, stream)
    name = f"{order['role']} {order['index']}"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)  # what top and ps show

