"""The lease keeper: a small process beside a role that renews the role's lease while the role itself cannot.

A role renews its lease from a thread, which runs only when it gets the interpreter's lock: code that holds the lock for
longer than the lease lasts (an extension in C, a large JSON text) would end a process that works. So a child process
watches, through a page of memory that both map, when the lease was renewed last; it renews when half of the TTL has
passed, and writes the new deadline into the page, where the role's `Session` finds it.

It must not make a process that does not work look alive. It renews only while the role

* lives (the child ends with it: by the kernel's signal, by the end of a pipe, or when it sees that its parent is gone),
* is not stopped (SIGSTOP, a debugger),
* has a main thread that is within its limit (see `process/progress.py`),
* has no daemon thread that hangs: then the main thread goes round and round while no renewal of its own is answered.

It never revives a lease: after the deadline, or when the role has closed it or takes it for lost, the keeper ends.

This file runs by itself (`python -I -S lease_keeper.py ...`), so it imports little: starting takes 20 ms and 9 MB.
gRPC and the etcd client (0.2 s of CPU, 26 MB) are loaded when the role is through with its start, or when a renewal
begins to be late.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` is not imported: this process starts in 20 ms
    from graphft.runtime.etcd.client import Etcd

MARGIN = 0.8
"""The part of the TTL that the holder trusts."""
LATE = 0.5
"""The keeper renews so long after the last renewal, as part of the TTL."""
LOAD = 0.4
"""It loads its client so long after its start, or after the last renewal, as part of the TTL."""
RETRY = 1 / 20
"""The pause after a renewal that was not answered, as part of the TTL."""
LOOK = 1 / 4
"""The longest time between two looks at the page, as part of the TTL."""
ROUNDS = 50
"""So many marks of the main thread since the role was seen to be late tell that the lock is free."""
PR_SET_PDEATHSIG = 1
END, REST, RENEW = "end", "rest", "renew"


def steady_clock() -> float:
    """Returns seconds that go on while the machine is suspended, the same in all of its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeasePage(ctypes.Structure):
    """The page by which a role and its keeper tell each other: numbers of 8 bytes, each written by one of the two.

    Times are of `steady_clock`, but for `beat`. Without a file, no other process can map it.
    """

    _fields_ = [
        (name, ctypes.c_double)
        for name in (
            # The role writes these.
            "ttl",
            "deadline",  # until when the lease is certain to live, by the role's own renewals
            "renewed",  # when the role sent its last renewal that was answered
            "beat",  # the main thread's last mark, by `time.monotonic`, ...
            "limit",  # ... how many seconds it may go without one, ...
            "beats",  # ... and how many there were
            "closed",  # not 0: the role has closed its session, or takes the lease for lost
            # The keeper writes these.
            "kept_deadline",  # as `deadline`, by the keeper's renewals
            "kept_renewed",
            "kept",  # the number of the keeper's renewals that were answered
            "ended",  # not 0: etcd says that the lease does not exist any more
            "seen",  # when the keeper looked last
            "ready",  # not 0: the keeper has loaded what it renews with
            "late",  # the `renewed` after which the keeper has seen the role late, ...
            "late_beats",  # ... and how many marks there were then: those before say nothing about the time since
        )
    ]
    late: float
    file = -1

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)

    @staticmethod
    def of(file: int) -> LeasePage:
        """Returns the page that this file holds."""
        page = LeasePage.from_buffer(mmap.mmap(file, ctypes.sizeof(LeasePage)))
        page.file = file
        return page

    @staticmethod
    def make() -> LeasePage:
        """Returns a new page; its file, which a child can inherit, is -1 where there is no such thing."""
        if not hasattr(os, "memfd_create"):
            return LeasePage()
        file = os.memfd_create("lease")
        os.ftruncate(file, ctypes.sizeof(LeasePage))
        return LeasePage.of(file)

    def begin(self, started: float, ttl: float) -> None:
        """Notes that the lease was granted; the request was sent at `started`."""
        self.ttl, self.limit = ttl, float("inf")
        self.renewed, self.deadline = started, started + ttl * MARGIN

    def renew(self, sent: float, ttl: float) -> None:
        """Notes that a renewal of the role's own was answered."""
        self.deadline, self.renewed = sent + ttl * MARGIN, sent

    def look(self, now: float) -> None:
        """Notes that the keeper looks, and the marks when it sees that the role is late."""
        self.seen = now
        if self.late != self.renewed and now - self.renewed >= LATE * self.ttl:
            self.late, self.late_beats = self.renewed, self.beats

    def live_until(self) -> float:
        """Returns until when the lease is certain to live, by all renewals."""
        return max(self.deadline, self.kept_deadline)


def decide(page: LeasePage, now: float, idle: float, state: str) -> tuple[str, str]:
    """Returns what to do, and why. `idle`: seconds since the main thread's last mark; `state`: as `state_of`."""
    if page.closed:
        return END, "the role has closed its lease, or takes it for lost"
    if state in ("", "Z", "X"):
        return END, "the role has ended"
    if now >= page.live_until():
        return END, "the lease is over"
    if state in ("T", "t"):
        return REST, "the role is stopped"
    if idle > page.limit:
        return REST, "the role's main thread is over its limit"
    if page.late == page.renewed and page.beats - page.late_beats >= ROUNDS and now - page.renewed > page.ttl:
        return REST, "the role's main thread gets on, and its daemon thread does not renew"
    if now - max(page.renewed, page.kept_renewed) < LATE * page.ttl:
        return REST, "the lease was renewed a moment ago"
    return RENEW, "the role is late"


def state_of(pid: int) -> str:
    """Returns the letter of a process's state in /proc; "" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


class Keeper:
    """The keeper's process. `role`: its parent's id; `pipe`: ends when the role does, or closes it."""

    def __init__(self, page: LeasePage, pipe: int, role: int, lease: int, urls: list[str], path: list[str]) -> None:
        self.page, self.role, self.lease, self.urls, self.path = page, role, lease, urls, path
        self._ends = select.poll()
        self._ends.register(pipe, select.POLLIN)
        self._client: Etcd | None = None
        self._born = steady_clock()

    def run(self) -> None:
        while not self.page.ended:
            now = steady_clock()
            self.page.look(now)
            state = state_of(self.role) if os.getppid() == self.role else ""
            what, _ = decide(self.page, now, time.monotonic() - self.page.beat, state)
            if what == END:
                return
            last = max(self.page.renewed, self.page.kept_renewed)
            if self._client is None and now - min(self._born, last) > LOAD * self.page.ttl:
                self._client = self._load()
                self.page.ready = 1
                continue  # which took a while
            answered = what == RENEW and self._renew(now)
            due = LOOK if answered else LATE - (now - last) / self.page.ttl
            if self._ends.poll(1000 * self.page.ttl * max(RETRY, min(due, LOOK))):
                return

    def _load(self) -> Etcd:
        sys.path[:] = self.path
        import contextlib

        from graphft.runtime.etcd.client import open_etcd
        from graphft.runtime.etcd.model import EtcdError

        client = open_etcd(self.urls)
        with contextlib.suppress(EtcdError):  # connects, so that the first renewal need not
            client.ping(RETRY * self.page.ttl)
        return client

    def _renew(self, started: float) -> bool:
        """Returns True if etcd answered, and in time: after the deadline, the role may have acted on the loss."""
        page = self.page
        if self._client is None:
            return False
        from graphft.runtime.etcd.model import EtcdError, LeaseLost

        try:
            limit = max(0.01, min(page.live_until() - started, page.ttl / 3))
            ttl = self._client.lease_keepalive_once(self.lease, deadline=limit)
        except LeaseLost:
            page.ended = 1
            return False
        except EtcdError:
            return False
        if page.closed or steady_clock() >= page.live_until():
            return False
        page.kept_renewed, page.kept = started, page.kept + 1
        page.kept_deadline = started + ttl * MARGIN
        return True


def main(arguments: list[str]) -> None:
    """ARGUMENTS: descriptors of page and pipe, the role's process id, the lease, endpoints (by comma), sys.path."""
    import signal

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the pipe tells the same, but not to a stopped keeper
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it ends with the role, which may take a moment
        signal.signal(number, signal.SIG_IGN)
    file, pipe, role, lease = map(int, arguments[:4])
    Keeper(LeasePage.of(file), pipe, role, lease, arguments[4].split(","), arguments[5:]).run()


if __name__ == "__main__":
    main(sys.argv[1:])
