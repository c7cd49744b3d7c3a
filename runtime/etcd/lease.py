"""A lease that its holder never believes in for longer than etcd does.

etcd ends a lease TTL seconds after it *received* the last renewal. The holder counts from *before it sent* that
renewal, and stops at a fraction (MARGIN) of the TTL, so it always stops first. Nothing but an answered renewal
moves that deadline. Once lost, a lease stays lost.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import graphft
from graphft.runtime.etcd import lease_keeper
from graphft.runtime.etcd.lease_keeper import MARGIN, RETRY, LeasePage, steady_clock
from graphft.runtime.etcd.model import EtcdError, LeaseLost, Store

FROZEN = 2.0
"""A keeper that has not looked for this part of the TTL is replaced."""
AGAIN = 1.0
"""The least time between two starts, as part of the TTL."""
REAP_SECONDS = 1.0
INTERVAL = 1 / 3  # of the TTL: between renewals, and the longest that one may take


class Session:
    """A lease of `ttl` seconds, renewed by `tick` (an op of a daemon block, say) or by `run_thread`, and by its keeper.

    `lease` is its id, `ttl` what etcd granted. Thread-safe. `with Session(...)` revokes it at the end.
    """

    def __init__(self, store: Store, ttl: int = 10, *, clock: Callable[[], float] = steady_clock) -> None:
        self.store, self._clock = store, clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = ""
        self._closed = False
        started = clock()
        self.lease, self.ttl = store.lease_grant(ttl)
        self._due = started + self.ttl * INTERVAL
        self.page = LeasePage.make()
        self.page.begin(started, self.ttl)
        self._keeper: KeeperProcess | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def remaining(self) -> float:
        """Returns the seconds for which the lease is certain to live; 0 once it is lost."""
        with self._lock:
            left = self.page.live_until() - self._clock()
            if self.page.ended:
                self._lose("it has expired, or was revoked")
            if left <= 0:
                self._lose(f"no renewal was answered for {MARGIN:.0%} of its TTL of {self.ttl} s")
            return 0.0 if self._lost else left

    def alive(self) -> bool:
        return self.remaining() > 0

    def check(self) -> None:
        """Raises `LeaseLost` unless the lease is certain to live. Cheap: call it before serving anything."""
        if not self.alive():
            raise LeaseLost(
                f"lease {self.lease:x} is lost: {self._lost}",
                rule="etcd-lease",
                help="stop what it protects at once; start anew with a new session",
            )

    def tick(self) -> float:
        """Renews if it is time to; returns the seconds until the next renewal is due. `LeaseLost` when it is over.

        Blocks while etcd does not answer, at most for a third of the TTL.
        """
        self.check()
        now = self._clock()
        if now >= self._due:
            self._renew(now)
            self.check()
        return self.due()

    def due(self) -> float:
        """Returns the seconds until the next renewal is due."""
        return max(0.0, self._due - self._clock())

    def run_thread(self) -> Session:
        """Ticks on a daemon thread until `close`, or until the lease is lost."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
            self._thread.start()
        return self

    def keep(self, urls: Sequence[str]) -> None:
        """Starts the keeper, or another one if it has died or hangs: to be called now and then.

        `urls`: etcd's, as the client was given them; login and certificates are those of the environment.
        """
        with self._lock:
            if urls and not self._closed:
                self._keeper = self._keeper or KeeperProcess(self.page, self.lease, urls)
                self._keeper.ensure()

    def close(self) -> None:
        """Stops renewing and revokes the lease; its keys vanish now, or within a TTL when etcd does not answer."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            first, self._closed = not self._closed, True
            self._lose("its session was closed")
            if first and self._keeper is not None:
                self._keeper.close()
        if first:
            with contextlib.suppress(EtcdError):  # it ends by itself then
                self.store.lease_revoke(self.lease, deadline=1.0)

    def _renew(self, started: float) -> None:
        try:
            limit = max(0.01, min(self.remaining(), self.ttl * INTERVAL))
            ttl = self.store.lease_keepalive_once(self.lease, deadline=limit)
        except LeaseLost as e:
            with self._lock:
                self._lose(e.message)
        except EtcdError:
            self._due = self._clock() + self.ttl * RETRY
        else:
            with self._lock:
                # An answer that came after the deadline does not count: someone may have acted on the loss.
                if self._clock() < self.page.live_until():
                    self.page.renew(started, ttl)
                    self._due = started + ttl * INTERVAL

    def _lose(self, why: str) -> None:
        """With the lock held: for good, and for the keeper, too."""
        self._lost, self.page.closed = self._lost or why, 1

    def _run(self) -> None:
        with contextlib.suppress(LeaseLost):
            while not self._stop.wait(self.tick()):
                pass


class KeeperProcess:
    """The role's end of its lease keeper (`lease_keeper.py`): starts it, replaces it when it dies, ends it.

    Not thread-safe. Where there is no memory to share it does nothing."""

    def __init__(self, page: LeasePage, lease: int, urls: Sequence[str]) -> None:
        self._page, self._lease, self._urls = page, lease, urls
        self.process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._started = 0.0

    def ensure(self) -> None:
        """Starts it, unless one runs and looks at its page. Cheap; to be called now and then."""
        now, ttl = steady_clock(), self._page.ttl
        if self._page.file < 0 or self._page.closed or (self._started and now - self._started < AGAIN * ttl):
            return
        if self.process is not None and self.process.poll() is None and now - self._page.seen < FROZEN * ttl:
            return
        self.close()
        self._started = now
        read, self._pipe = os.pipe()
        package = str(Path(graphft.__file__).resolve().parent.parent)  # an editable install may find it otherwise
        numbers = [str(n) for n in (self._page.file, read, os.getpid(), self._lease)]
        path = [*(p for p in sys.path if p != package), package]
        command = [sys.executable, "-I", "-S", lease_keeper.__file__, *numbers, ",".join(self._urls), *path]
        with contextlib.suppress(OSError):  # no process to be had: the role renews by itself
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(self._page.file, read), start_new_session=True
            )
        os.close(read)

    def close(self) -> None:
        """Ends it. Repeatable."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(REAP_SECONDS)
            self.process = None
