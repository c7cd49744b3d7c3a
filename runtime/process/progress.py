"""Whether the main thread of a process gets on: it marks that, and the daemon thread looks.

    progress.beat()                                # main thread: at each step, each op that waits for other processes
    with progress.within(math.inf, "loading data"): ...    # what may take longer, or as long as it likes
    progress.begin("training")                     # the start is over: from now on the usual limit holds
    if progress.hung(): ...                        # daemon thread (op etcd_keep_alive): no beat within the limit

A lease says that a process lives, for its daemon thread renews it. It does not say that the process works: a read that
blocks for ever or a deadlock in user code leaves the daemon thread running. So what a process may claim, and for how
long it may stay, depends on these marks.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

LOOK_SECONDS = 2.0
"""One look counts at most so many seconds: while a whole process was stopped, its main thread was not stuck."""

FRESH_SECONDS, FRESH_PART = 1.0, 0.25
"""For how long a mark is fresh: seconds, or this part of the limit."""

READS_AHEAD, DATASETS = "graphft-prefetch", "graphft-dataset"
"""With what the names of a trainer's threads begin that read ahead, and that read Datasets."""


class Page(Protocol):
    """Memory that is shared with the lease's keeper, see `etcd/lease_keeper.py`."""

    beat: float
    beats: float
    limit: float


class Progress:
    """Marks of one main thread. `last` and `limit` may be read from any thread.

    `last`: when it got on last, by `clock` (CLOCK_MONOTONIC, which all processes of a machine share). `limit`: seconds
    that it may go without a mark now; infinite until `begin`. `doing`: what it is at, in words.
    """

    def __init__(self, usual: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.usual, self._clock = usual, clock
        self._page: Page | None = None
        self.limit, self.doing = math.inf, "starting"
        self.thread = threading.main_thread()
        """Whose marks these are: the thread that begins."""
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
        """Another limit, in seconds, for what is done inside."""
        before = self.limit, self.doing
        self.beat()
        self.limit, self.doing = limit, doing
        try:
            yield
        finally:
            self.beat()
            self.limit, self.doing = before

    def fresh(self, since: float) -> bool:
        """Whether the main thread got on after `since`, and a moment ago: something may be claimed for it."""
        return self.last > since and self._clock() - self.last <= max(FRESH_SECONDS, self.limit * FRESH_PART)

    # -- the lease's keeper -------------------------------------------------------------------------------------

    def share(self, page: Page) -> None:
        """From now on the marks and the limit are in this page, too: the keeper renews no lease of a process that
        hangs. `clock` must be CLOCK_MONOTONIC then."""
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
        """Seconds without a mark, as far as this process ran meanwhile. To be called again and again, by one thread."""
        now, last = self._clock(), self.last
        self._idle = self._idle + min(now - self._looked, LOOK_SECONDS) if last == self._seen else 0.0
        self._looked, self._seen = now, last
        return self._idle

    def hung(self) -> bool:
        """Whether the main thread is over its limit."""
        return self.idle() > self.limit

    def left(self) -> float:
        """Seconds until it is, as of the last look."""
        return max(0.0, self.limit - self._idle)


def rate(amount: float, seconds: float) -> float:
    """Per second; 0 when no time has passed, by a coarse clock."""
    return amount / seconds if seconds > 0 else 0.0


def where(thread: threading.Thread, depth: int | None = None) -> str:
    """Where a thread is now: its innermost `depth` calls as text, the innermost one last; "" if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame, depth)) if frame is not None else ""


def stacks(main: threading.Thread, depth: int | None = None) -> str:
    """Where a thread is, and the threads that read ahead and Datasets: the cause of its wait is often there."""
    threads = [main, *(t for t in threading.enumerate() if t.name.startswith((READS_AHEAD, DATASETS)))]
    return "\n".join(f"{t.name}:\n{where(t, depth)}" for t in threads)
