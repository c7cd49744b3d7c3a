"""The actor that runs on a node of Ray for one process of a role, which is its child.

So it can be stopped, killed, and asked for its exit status as on any machine, while the actor answers. It ends with
the actor: the kernel sees to that, so that nothing is left where a worker of Ray was killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
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
"""A question for news waits for some for so long."""
PIECE = 1 << 20


class News(msgspec.Struct, frozen=True, array_like=True):
    """`output`: what the process wrote since the last time. `status`: once it has ended, and its output is read."""

    identity: Identity
    node: str
    output: bytes
    status: int | None


class RoleActor:
    """`follow` waits while `send_signal` is called: to be made with `max_concurrency` of 2 or more."""

    def __init__(self, name: str, folder: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts `python -m graphft COMMAND`. `folder`: of the run on this node; made if it is not there."""
        self.node = ray.get_runtime_context().get_node_id()
        place = Path(folder) / self.node[:8]
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)  # where the process has its copy of the job
        self._log = place / "logs" / f"{name.replace(' ', '-')}.log"
        self._log.unlink(missing_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._identity = UNKNOWN
        self._status: int | None = None
        environment = {"GRAPHFT_HOST": get_node_ip_address(), **environment}
        # The kernel takes the thread that starts a process for its parent.
        threading.Thread(target=self._run, args=(command, environment), name=name, daemon=True).start()

    def follow(self, position: int, made: bool) -> bytes:
        """News (as msgpack): from this position of its output on. `made`: it is known that the process exists. Waits
        for some, up to NEWS_SECONDS."""
        end = time.monotonic() + NEWS_SECONDS
        while True:
            status = self._status
            output = self._read(position)
            if output or status is not None or (self._process is not None and not made) or time.monotonic() > end:
                whole = len(output) < PIECE
                return msgspec.msgpack.encode(News(self._identity, self.node, output, status if whole else None))
            time.sleep(LOOK_SECONDS)

    def send_signal(self, signum: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def _run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            process = spawn(command, self._log, environment)
        except OSError as error:
            self._log.write_text(f"it cannot be started: {error}\n")
            self._status = EXIT_FAILED
            return
        self._identity, self._process = identify(process.pid), process
        self._status = process.wait()

    def _read(self, position: int) -> bytes:
        try:
            with self._log.open("rb") as file:
                file.seek(position)
                return file.read(PIECE)
        except OSError:  # it is not there so far, or somebody has deleted it
            return b""
