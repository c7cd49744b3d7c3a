"""Progress of a process's main thread: it makes marks, and the daemon thread looks at them.

    progress.beat()                                # main thread: at each step, each op that waits for other processes
    with progress.within(math.inf, "loading data"): ...    # what may take longer, or as long as it likes
    progress.begin("training")                     # the start is over: from now on the usual limit holds
    if progress.hung(): ...                        # daemon thread (op etcd_keep_alive): no beat within the limit

A lease says that a process lives; these marks say that it works."""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOOK_SECONDS = 2.0
"""One look counts at most so many seconds: while a whole process was stopped, its main thread was not stuck."""
FRESH_SECONDS, FRESH_PART = 1.0, 0.25
"""For how long a mark is fresh: seconds, or this part of the limit."""
READS_AHEAD, DATASETS = "graphft-prefetch", "graphft-dataset"
"""Beginnings of the names of a trainer's threads that read ahead, and that read Datasets."""


class Progress:
    """Marks of one main thread. `last` and `limit` may be read from any thread. `last`: time of the newest mark, by
    `clock` (CLOCK_MONOTONIC, which all processes of a machine share). `limit`: seconds that it may go without a mark
    now; infinite until `begin`. `doing`: its present work, in words."""

    def __init__(self, usual: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.usual, self._clock = usual, clock
        self._page: Any = None
        """Memory that is shared with the lease's keeper, see `etcd/lease_keeper.py`."""
        self.limit, self.doing = math.inf, "starting"
        self.thread = threading.main_thread()
        """The thread that makes the marks: the one that begins."""
        self.last = self._looked = self._seen = clock()
        self._idle = 0.0

    # -- the main thread ----------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Something was done, or the wait for another process goes on as it should."""
        self.last = self._clock()
        if self._page is not None:
            self._page.beat, self._page.beats = self.last, self._page.beats + 1

    def begin(self, doing: str) -> None:
        """From now on the usual limit holds, for the thread that calls this."""
        self.thread = threading.current_thread()
        self.beat()
        self.limit, self.doing = self.usual, doing

    @contextmanager
    def within(self, limit: float, doing: str) -> Iterator[None]:
        """Sets another limit, in seconds, for the block."""
        before = self.limit, self.doing
        self.beat()
        self.limit, self.doing = limit, doing
        try:
            yield
        finally:
            self.beat()
            self.limit, self.doing = before

    def fresh(self, since: float) -> bool:
        """True if there is a mark after `since` that is fresh: something may be claimed for the main thread."""
        return self.last > since and self._clock() - self.last <= max(FRESH_SECONDS, self.limit * FRESH_PART)

    # -- the lease's keeper -------------------------------------------------------------------------------------

    def share(self, page: Any) -> None:
        """Keeps the marks and the limit in this page, too: the keeper renews no lease of a process that hangs."""
        self._page = page
        page.beat, page.limit = self.last, self.limit

    @property
    def limit(self) -> float:
        return self._limit

    @limit.setter
    def limit(self, seconds: float) -> None:
        self._limit = seconds
        if self._page is not None:
            self._page.limit = seconds

    # -- the daemon thread --------------------------------------------------------------------------------------

    def idle(self) -> float:
        """Returns the seconds without a mark, as far as this process ran meanwhile. To be called regularly."""
        now, last = self._clock(), self.last
        self._idle = self._idle + min(now - self._looked, LOOK_SECONDS) if last == self._seen else 0.0
        self._looked, self._seen = now, last
        return self._idle

    def hung(self) -> bool:
        """True if the main thread is over its limit."""
        return self.idle() > self.limit

    def left(self) -> float:
        """Returns the seconds until it is, as of the last look."""
        return max(0.0, self.limit - self._idle)


def rate(amount: float, seconds: float) -> float:
    """Returns the amount per second; 0 when no time has passed, by a coarse clock."""
    return amount / seconds if seconds > 0 else 0.0


def stacks(main: threading.Thread, depth: int | None = None) -> str:
    """Returns the innermost calls of a thread, and of those that read data, where the cause of its wait often is."""
    threads = [main, *(t for t in threading.enumerate() if t.name.startswith((READS_AHEAD, DATASETS)))]
    frames = sys._current_frames()
    calls = {t.name: traceback.format_stack(frames[t.ident], depth) for t in threads if t.ident in frames}
    return "\n".join(f"{name}:\n{''.join(lines)}" for name, lines in calls.items())
