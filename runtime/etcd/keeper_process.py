"""The role's end of its lease keeper (see `lease_keeper.py`): starts it, replaces it when it dies, ends it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import graphft
from graphft.runtime.etcd import lease_keeper
from graphft.runtime.etcd.lease_keeper import LeasePage, steady_clock

FROZEN = 2.0
"""Of the TTL: a keeper that has not looked for that time is replaced."""
AGAIN = 1.0
"""Of the TTL: the least time between two starts."""
REAP_SECONDS = 1.0


class KeeperProcess:
    """The keeper of one lease. Not thread-safe. Where there is no memory to share it does nothing."""

    def __init__(self, page: LeasePage, lease: int, urls: Sequence[str]) -> None:
        self._page, self._lease, self._urls = page, lease, urls
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._started = 0.0

    @property
    def pid(self) -> int:
        """0 if none was started."""
        return self._process.pid if self._process is not None else 0

    def ensure(self) -> None:
        """Starts it, unless one runs and looks at its page. Cheap; to be called now and then."""
        now, ttl = steady_clock(), self._page.ttl
        if self._page.file < 0 or self._page.closed or (self._started and now - self._started < AGAIN * ttl):
            return
        if self._process is not None and self._process.poll() is None and now - self._page.seen < FROZEN * ttl:
            return
        self.close()
        self._started = now
        with contextlib.suppress(OSError):  # no process to be had: the role renews by itself
            self._start(self._page.file)

    def _start(self, memory: int) -> None:
        read, self._pipe = os.pipe()
        package = str(Path(graphft.__file__).resolve().parent.parent)  # an editable install may find it otherwise
        numbers = [str(n) for n in (memory, read, os.getpid(), self._lease)]
        command = [
            sys.executable,
            "-I",
            "-S",
            lease_keeper.__file__,
            *numbers,
            ",".join(self._urls),
            *(p for p in sys.path if p != package),
            package,
        ]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(memory, read), start_new_session=True
            )
        finally:
            os.close(read)

    def close(self) -> None:
        """Ends it. Repeatable."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_SECONDS)
            self._process = None
