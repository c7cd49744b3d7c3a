"""A child process that cannot outlive its parent, not even one that is killed with SIGKILL.

Linux sends a child a signal of its choice when its parent dies (PR_SET_PDEATHSIG). Two traps: the "parent" is the
*thread* that started the child, so each child here gets a thread that waits for it; and the setting must be made in
the child, where `preexec_fn` is unsafe in a process with threads (gRPC's above all). A small Python program makes the
setting instead and becomes the real one by exec, in about 20 ms. Elsewhere than on Linux the child is started plainly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from graphft.runtime.etcd.errors import EtcdError

# argv: parent's pid, program, its arguments. The parent may have died before prctl took effect, hence getppid.
WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One run of a program, with its output appended to `log`, in a session of its own (Ctrl-C does not reach it)."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = [str(part) for part in command]
        if sys.platform == "linux":
            self._command = [sys.executable, "-I", "-S", "-c", WRAPPER, str(os.getpid()), *self._command]
        self._log = log
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name=f"child {log.stem}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise EtcdError(f"{command[0]} does not start: {self._error}", rule="etcd-start") from self._error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the child still runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until all of the child's threads have stopped: the signal alone takes effect later."""
        self.send(signal.SIGSTOP)
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # it has ended
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the child has ended (and was collected) within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as e:
            self._error = e
        finally:
            self._started.set()
        if self._process is not None:
            self._process.wait()
