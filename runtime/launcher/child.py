"""A role that a launcher keeps running, over all of its processes; and what those have started by themselves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from graphft.runtime.engines.base import Order, Process
from graphft.runtime.process.identity import STARTED, UNKNOWN, Identity, identify, stat_of

BACKOFF_SECONDS, BACKOFF_LIMIT = 0.25, 10.0
QUICK_FAILURE_SECONDS = 30.0
"""Failures after less than this are in a row: each doubles the delay before the next start."""
QUICK_PREEMPTION_SECONDS = 5.0
"""So are preemptions: a process that is killed whenever it starts (out of memory, say) must not burn the machine."""
ROOM_SECONDS, ROOM_LIMIT = 0.5, 30.0
"""Before an order is given again that the engine did not take: twice as long each time, at most `ROOM_LIMIT`, and by
chance down to half of it."""


@dataclass(slots=True)
class Child:
    """One role of the job on this machine, over all of its processes.

    `stuck` counts failures since the job last made progress, `refused` how often in a row the engine did not take the
    order of a process. `death` tells in words how it failed last; `died_at` and `died_started` (monotonic) when, and
    when that process was started. `registered` was registered last, and is not any more since `gone_at`.
    """

    role: str
    index: int
    process: Process | None = None
    identity: Identity = UNKNOWN
    started_at: float = 0.0
    restart_at: float | None = None
    done: bool = False
    failures: int = 0
    preemptions: int = 0
    in_a_row: int = 0
    stuck: int = 0
    failed_at: int = -1
    death: str = ""
    died_at: float = 0.0
    died_started: float = 0.0
    registered: Identity = UNKNOWN
    gone_at: float | None = None
    refused: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    def order(self, endpoints: str) -> Order:
        return Order(self.role, self.index, endpoints)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def waits(self) -> bool:
        return self.process is not None and self.alive and not self.process.pid

    @property
    def stopped(self) -> bool:
        try:
            return self.identity.visible and psutil.Process(self.identity.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def preempt(self) -> None:
        self.preemptions += 1
        self._count_in_a_row(QUICK_PREEMPTION_SECONDS)

    def fail(self, progress: int, counts: bool, queue_ends_it: bool) -> None:
        """Counts a failure when the job had made this progress. `counts`: against the process, and not against a batch.
        `queue_ends_it`: after some the batch is left out, or the job ends."""
        self.failures += 1
        if counts:
            self.stuck = self.stuck + 1 if progress <= self.failed_at else 1
            self.failed_at = progress
        self._count_in_a_row(0.0 if queue_ends_it else QUICK_FAILURE_SECONDS)

    def _count_in_a_row(self, quick: float) -> None:
        self.in_a_row = self.in_a_row + 1 if time.monotonic() - self.started_at < quick else 1

    def delay(self, at_once: bool) -> float:
        """Returns the seconds before it is started again. `at_once`: the first time in a row."""
        if at_once and self.in_a_row == 1:
            return 0.0
        return min(BACKOFF_SECONDS * 2 ** min(self.in_a_row - 1, 10), BACKOFF_LIMIT)

    def restart_in(self, seconds: float) -> None:
        self.restart_at = time.monotonic() + seconds

    def await_room(self) -> None:
        """Has the order given again, which the engine has not taken, and not at the same time as other children's."""
        self.restart_in(min(ROOM_SECONDS * 2**self.refused, ROOM_LIMIT) * (1 - random.random() / 2))
        self.refused += 1


class ChildProcesses:
    """Processes that roles start by themselves. When a role dies, the launcher, a subreaper, adopts them: it ends those
    that live, as they may hold a GPU or connections, and collects them. One that was started after the last look is not
    seen."""

    def __init__(self) -> None:
        self._known: set[Identity] = set()
        self._lock = threading.Lock()

    @property
    def left(self) -> bool:
        return bool(self._known)

    def look(self, roles: Iterable[Identity]) -> None:
        """Notes the children of these roles, if they live; ends, and collects, what others have left."""
        with self._lock:
            for role in roles:
                if identify(role.pid) == role:
                    self._known.update(_children(role.pid))
            self._known = {child for child in self._known if not _is_gone(child)}


def _children(pid: int) -> list[Identity]:
    """Returns the living children of a process. Each of its threads has its own; a thread's id may be one of this
    process's."""
    found: list[Identity] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # that thread has ended meanwhile
                found += [identify(int(child)) for child in (task / "children").read_text().split()]
    return [child for child in found if child.pid and stat_of(child.pid)[1:2] == [str(pid)]]


def _is_gone(child: Identity) -> bool:
    """Returns True if it has ended, and is collected; one that this process has adopted is killed."""
    stat = stat_of(child.pid)
    if not stat or int(stat[STARTED]) != child.started:
        return True
    state, parent = stat[:2]
    if int(parent) != os.getpid():
        return False
    if state not in "ZX":
        with contextlib.suppress(OSError):  # somebody else has collected it meanwhile; or it runs as another user
            os.kill(child.pid, signal.SIGKILL)
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    return True
