"""The processes of some tests are forks of one process that has imported torch, which takes two seconds of a core.

Real commands, from Python's start on, are run by tests/examples, tests/chaos and tests/engines, and where a process is
to have variables that count before torch is imported.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from graphft.runtime.cli import main
from graphft.runtime.engines import local
from graphft.runtime.process import role_process as processes

REQUEST_BYTES = 1 << 17
ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36
FREE = ("ONEDNN_MAX_CPU_ISA", "PYTEST_CURRENT_TEST", "PYTHONPATH", "RANK", "TORCHINDUCTOR_CACHE_DIR", "WORLD_SIZE")
"""Variables that may differ from the nursery's, as all of graphft's may: they are read, or set, later on."""


class Child:
    """A fork of the nursery, which is this process's child. To be used like a `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: BinaryIO | None, stdout: BinaryIO | None) -> None:
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
                raise subprocess.TimeoutExpired("a fork of the nursery", timeout or 0)
            time.sleep(0.005)
        return status

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """The process of which others are forks; it must be a descendant of whoever uses it, whose children they become."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {n: v for n, v in environment.items() if n not in FREE}
        self._address = f"\0graphft-nursery-{os.getpid()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._address)
        self._listener.listen()
        self._theirs, self._ours = os.pipe()
        """It ends when nobody has the second end any more."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def begun(self) -> None:
        """It exists: what is its own is no more this process's."""
        self._listener.close()
        os.close(self._theirs)

    def close(self) -> None:
        os.close(self._ours)

    def start(self) -> subprocess.Popen[bytes]:
        """Makes it a process of its own, which imports torch."""
        command = [sys.executable, "-m", "tests.support.nursery", str(self._listener.fileno()), str(self._theirs)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=self.environment,
            cwd=ROOT,
            pass_fds=[self._listener.fileno(), self._theirs],
        )
        self.begun()
        return process

    def fork(self) -> None:
        """Makes it a fork of this process, which has one thread, and has imported torch."""
        if os.fork():
            self.begun()
            return
        os.close(self._ours)
        os.chdir("/")
        serve(self._listener, self._theirs)
        os._exit(0)

    def spawn(self, command: Sequence[str], log: Path, environment: Mapping[str, str], **streams: Any) -> Any:
        """Does what `runtime.process.spawn` does, which it calls where a fork would not do."""
        wanted = {**os.environ, **environment, processes.PARENT: str(os.getpid())}
        if not self._serves(wanted):
            return processes.spawn(command, log, environment, **streams)
        log.parent.mkdir(parents=True, exist_ok=True)
        (stdin, writes), (reads, stdout) = os.pipe(), os.pipe()
        with log.open("ab") as out, open(stdin, "rb") as taken, open(stdout, "wb") as given:
            # In the job's folder, which is the end of its command line: that of a fork is the nursery's. If that is
            # a relative one, this process is in a folder of the test's.
            folder = Path(command[-1]) if os.path.isabs(command[-1]) else Path.cwd()
            pid = self._ask(["-m", "graphft", *command], folder, wanted, (taken, given, out))
        return Child(pid, open(writes, "wb", buffering=0), open(reads, "rb"))

    def python(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], out: BinaryIO) -> Any:
        """Runs `python ARGUMENTS` in this folder."""
        if arguments[0] != "-c" and self._serves(environment):
            with open(os.devnull, "rb") as nothing:
                return Child(self._ask(arguments, folder, environment, (nothing, out, out)), None, None)
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )

    def _serves(self, environment: Mapping[str, str]) -> bool:
        """True if a process with this environment can be a fork. What only roles need may be missing in it."""
        return _that_count({**self.environment, **environment}) == _that_count(self.environment)

    def _ask(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[BinaryIO]
    ) -> int:
        request = {
            "arguments": list(arguments),
            "folder": str(folder.absolute()),
            "parent": os.getpid(),
            "environment": {**self.environment, **environment},
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(self._address)
            socket.send_fds(connection, [json.dumps(request).encode()], [stream.fileno() for stream in streams])
            return int(connection.recv(16))


def _that_count(environment: Mapping[str, str]) -> dict[str, str]:
    return {n: v for n, v in environment.items() if n not in FREE and not n.startswith("GRAPHFT_")}


def serve(listener: socket.socket, alive: int) -> None:
    """The nursery. Returns when it is to end; in a fork it does not return."""
    while True:
        ready, _, _ = select.select([listener, alive], [], [])
        if alive in ready:
            return
        connection, _ = listener.accept()
        data, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for stream in streams:
                os.close(stream)
            connection.close()
        elif os.fork():
            os._exit(0)
        else:
            listener.close()
            os.close(alive)
            _become(json.loads(data), streams, connection)


def _become(request: dict[str, Any], streams: list[int], connection: socket.socket) -> None:
    while os.getppid() != request["parent"]:  # which adopts it
        time.sleep(0.0005)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    connection.send(str(os.getpid()).encode())
    connection.close()
    np.random.seed()  # Python's own generator does that by itself
    torch.set_num_threads(1)  # a fork's first use of torch's pool makes it anew: two threads at once would abort
    first, *others = request["arguments"]
    command = others[1:] if [first, *others[:1]] == ["-m", "graphft"] else ["script"]
    if command[0] not in ("start", "fork-server"):  # a launcher: its fork server comes from a nursery of its own
        nursery = Nursery(os.environ)
        nursery.fork()
        local.spawn = nursery.spawn
    if command[0] != "script":
        sys.exit(main(command))
    sys.argv, sys.path[0] = [first, *others], str(Path(first).parent)
    runpy.run_path(first, run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    from graphft import build  # noqa: F401  (that all of it is loaded is the point)

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
