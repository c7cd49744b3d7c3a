"""The launcher's end of a process on Ray."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import exceptions

from graphft.runtime.engines.ray_role import News
from graphft.runtime.process.identity import UNKNOWN, Identity
from graphft.runtime.process.role_process import EXIT_FAILED

log = logging.getLogger("graphft")

AGAIN_SECONDS = 0.5
"""Before an actor that did not answer, and is not known to be dead, is asked again."""


class RayProcess:
    """To be used like a `subprocess.Popen`. Its output is appended to `log_file`, if this machine can write that.

    `begin` is called when its actor stands, and tells what that is to do; it may wait, but not once `taken_back` is not
    0. An actor that is lost, with its node or alone, is a process that SIGKILL has ended.
    """

    def __init__(self, name: str, actor: Any, wants: str, log_file: Path, begin: Callable[[RayProcess], Any]) -> None:
        self.name, self.actor, self._wants, self._log, self._begin = name, actor, wants, log_file, begin
        self.identity, self.node = UNKNOWN, ""
        self.returncode: int | None = None
        self.stands = False
        """Whether there was room for its actor."""
        self.begun = False
        """Whether its actor was told what to do."""
        self.lacks = ""
        """Why no node could take it now, were it empty."""
        self.refusal = ""
        """Why it could not be made, on any node that Ray tried."""
        self.taken_back = 0
        """The signal that ended it before it existed, or that killed it."""
        self._ordered_at = time.monotonic()
        self._made, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name=f"ray: {name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def place(self) -> str:
        if self._made.is_set():
            return f"node {self.node[:8]}" if self.node else ""
        return f"waiting for {self._wants}" + (f": {self.lacks}" if self.lacks else "")

    @property
    def waits_for(self) -> float:
        """For so many seconds it has waited for an actor; 0 when that is over."""
        return time.monotonic() - self._ordered_at if not self.stands and self.returncode is None else 0.0

    def await_made(self) -> Identity:
        self._made.wait()
        return self.identity

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """SIGKILL ends the actor, with its process, and whether or not its node answers."""
        with self._lock:
            if self.returncode is not None or (not self._made.is_set() and signum not in (9, 15)):
                return
            if signum == signal.SIGKILL or not self._made.is_set():
                self.taken_back = self.taken_back or signum
                kill(self.actor)
                return
        self.actor.send_signal.remote(signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def join(self, timeout: float) -> None:
        """Waits till nothing of it uses Ray any more."""
        self._thread.join(timeout)

    def _follow(self) -> None:
        position = 0
        while True:
            try:
                if not self.begun:
                    ray.get(self.actor.stands.remote())
                    self.stands = True
                    ray.get(self._begin(self))
                    self.begun = True
                answer = self.actor.follow.remote(position, self._made.is_set())
                news = msgspec.msgpack.decode(ray.get(answer), type=News)
            except exceptions.ActorUnavailableError:  # it may come back
                time.sleep(AGAIN_SECONDS)
                continue
            except (exceptions.RayError, OSError, RuntimeError) as error:
                self._end(self._status_of(error))
                return
            position += len(news.output)
            self._write(news.output)
            with self._lock:
                self.identity, self.node = news.identity, news.node
                if news.identity != UNKNOWN:
                    self._made.set()
            if news.status is not None:
                kill(self.actor)  # gives its resources back
                self._end(news.status)
                return

    def _status_of(self, error: BaseException) -> int:
        lost = isinstance(error, exceptions.RayActorError) and not error.actor_init_failed
        if lost or self.taken_back or not ray.is_initialized():
            return -(self.taken_back or signal.SIGKILL)
        self.refusal = str(error).strip().splitlines()[-1]
        self._write(f"{error}\n".encode())
        return EXIT_FAILED

    def _end(self, status: int) -> None:
        with self._lock:
            self.returncode = status
        self._ended.set()
        self._made.set()

    def _write(self, output: bytes) -> None:
        if output:
            with contextlib.suppress(OSError), self._log.open("ab") as file:
                file.write(output)


def kill(actor: Any) -> None:
    """Ends an actor, or takes it back before it is made. Not an error if it is dead."""
    with contextlib.suppress(exceptions.RayError, ValueError, RuntimeError):
        ray.kill(actor, no_restart=True)
