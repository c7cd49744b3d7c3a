"""What runs on a node of Ray for one process of a role: an actor, whose child that process is.

So it can be stopped, killed, and asked for its exit status as on any machine, while the actor answers. It ends with
the actor: the kernel sees to that, so that nothing is left where a worker of Ray was killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import ray
from ray.util import get_node_ip_address

from graphft.runtime.process.identity import UNKNOWN, Identity, identify
from graphft.runtime.process.role_process import EXIT_FAILED, spawn

LOOK_SECONDS = 0.2
"""Between two looks at what the process has written."""
NEWS_SECONDS = 10.0
"""For how long a question for news waits for some."""
PIECE = 1 << 20


class News(msgspec.Struct, frozen=True, array_like=True):
    """`output`: what the process wrote since the last time. `status`: once it has ended."""

    identity: Identity
    node: str
    output: bytes
    status: int | None


class RoleActor:
    """`follow` may wait while `send_signal` is called: to be made with `max_concurrency` of 2 or more.

    What it is to run is said by `begin`, not when it is ordered: it may wait for room for hours, and etcd be elsewhere
    by then.
    """

    def __init__(self, name: str, folder: str) -> None:
        """`folder`: of the run on this node; made if it is not there."""
        self.name, self.node = name, ray.get_runtime_context().get_node_id()
        place = Path(folder) / self.node[:8]
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)  # where the process has its copy of the job
        self.log = place / "logs" / f"{name.replace(' ', '-')}.log"
        self.log.unlink(missing_ok=True)
        self._changed, self._begun = threading.Condition(), threading.Event()
        self._identity, self._size = UNKNOWN, 0
        self._status: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def stands(self) -> None:
        """Returns: there was room for it."""

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts `python -m graphft COMMAND`. Once: this may be asked again, if the answer was lost."""
        if self._begun.is_set():
            return
        self._begun.set()
        environment = {"GRAPHFT_HOST": get_node_ip_address(), **environment}
        # The kernel takes the thread that starts a process for its parent.
        threading.Thread(target=self._run, args=(command, environment), name=self.name, daemon=True).start()

    def __repr__(self) -> str:
        """Before each line of its log, where Ray shows it."""
        return self.name

    def follow(self, position: int, made: bool) -> bytes:
        """News (as msgpack): from this position of its output on. `made`: it is known that the process exists. Waits
        for some, up to NEWS_SECONDS."""

        def some() -> bool:
            return self._size > position or self._status is not None or (not made and self._process is not None)

        with self._changed:
            self._changed.wait_for(some, NEWS_SECONDS)
            identity, size, status = self._identity, self._size, self._status
        output = self._read(position, min(size, position + PIECE))
        whole = position + len(output) >= size
        return msgspec.msgpack.encode(News(identity, self.node, output, status if whole else None))

    def send_signal(self, signum: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def _run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            process = self._process = spawn(command, self.log, environment)
        except OSError as error:
            print(f"{self.name} cannot be started: {error}", file=sys.stderr, flush=True)
            self._change(UNKNOWN, EXIT_FAILED)
            return
        self._change(identify(process.pid), None)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
            status = process.returncode
            self._copy_output()
            if status is not None:
                self._change(self._identity, status)
                return

    def _change(self, identity: Identity, status: int | None) -> None:
        with self._changed:
            self._identity, self._status = identity, status
            self._changed.notify_all()

    def _copy_output(self) -> None:
        """What was written since, to where Ray has the output of its workers."""
        try:
            size = self.log.stat().st_size
        except OSError:  # somebody has deleted it
            return
        while self._size < size:
            piece = self._read(self._size, min(size, self._size + PIECE))
            with contextlib.suppress(OSError):
                os.write(1, piece)
            with self._changed:
                self._size += len(piece)
                self._changed.notify_all()
            if not piece:
                return

    def _read(self, begin: int, end: int) -> bytes:
        try:
            with self.log.open("rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        except OSError:
            return b""
