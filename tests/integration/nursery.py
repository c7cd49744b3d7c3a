"""Where the standbys of these tests come from: they are forks of one process that has imported torch.

A launcher starts `python -m graphft standby`, which takes two seconds of a core, nearly all of them to import torch;
here one process is the launcher of some sixty jobs. What a launcher does by itself is tested with scripts and commands.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from graphft.runtime import process as processes

REQUEST_BYTES = 1 << 17


class Child:
    """A fork of the nursery, which is this process's child. To be used like a `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has collected it
                    self.returncode = -signal.SIGKILL
                else:
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("standby", timeout or 0)
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process of which standbys are forks. It begins with the first of them, and has that one's environment."""

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        self._ours: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self, command: Sequence[str], log: Path, environment: Mapping[str, str], **streams: Any) -> Any:
        """As `runtime.process.spawn`, which it calls for a standby of another environment."""
        wanted = _now() | dict(environment)
        if self._ours is None:
            self._ours = self._begin(wanted)
        if wanted != self._environment:
            return processes.spawn(command, log, environment, **streams)
        log.parent.mkdir(parents=True, exist_ok=True)
        (stdin, writes), (reads, stdout) = os.pipe(), os.pipe()
        with log.open("ab") as out, open(stdin, "rb") as taken, open(stdout, "wb") as given:
            request = json.dumps({"command": list(command), "parent": os.getpid()}).encode()
            socket.send_fds(self._ours, [request], [taken.fileno(), given.fileno(), out.fileno()])
            pid = int(self._ours.recv(16))
        return Child(pid, open(writes, "wb", buffering=0), open(reads, "rb"))

    def _begin(self, environment: Mapping[str, str]) -> socket.socket:
        self._environment = dict(environment)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.nursery", str(theirs.fileno())], stdin=subprocess.DEVNULL,
                env=self._environment, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[2])
        return ours

    def close(self) -> None:
        """Ends it. Its forks are children of this process."""
        if self._ours is not None and self._process is not None:
            self._ours.close()
            self._process.wait()


def _now() -> dict[str, str]:
    """This process's environment, but for what pytest changes with each test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def serve(requests: socket.socket) -> None:
    import torch

    from graphft.runtime.cli import main
    from graphft.runtime.roles import pserver_sync, trainer_sync  # noqa: F401

    torch.set_num_threads(1)
    while True:
        data, streams, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 3)
        if not data:
            return
        request = json.loads(data)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for stream in streams:
                os.close(stream)
        elif os.fork():
            os._exit(0)
        else:
            _become(request, streams, requests)
            sys.exit(main(request["command"]))


def _become(request: dict[str, Any], streams: list[int], requests: socket.socket) -> None:
    while os.getppid() != request["parent"]:  # which adopts it
        time.sleep(0.0005)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ[processes.PARENT] = str(request["parent"])
    os.chdir(request["command"][-1])  # the job's folder: its command line, which is the nursery's, does not tell it
    requests.send(str(os.getpid()).encode())
    requests.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
