"""Starting a job's roles on this machine, and starting them again when they die."""

from __future__ import annotations

import logging
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from graphft.errors import plain_text
from graphft.runtime.etcd import Etcd, EtcdError
from graphft.runtime.events import Events
from graphft.runtime.keys import Keys
from graphft.runtime.process import EXIT_OK, EXIT_USAGE, describe_exit, start_role, was_preempted
from graphft.runtime.standby import Forked, Standby
from graphft.runtime.view import JobView, Registration, read_view

log = logging.getLogger("graphft")

BACKOFF_SECONDS = 0.25
BACKOFF_LIMIT = 10.0
STANDBY_AFTER_SECONDS = 5.0
"""A standby that died is replaced so long after it was missed: whoever needs the machine now comes first."""
QUICK_FAILURE_SECONDS = 30.0
"""Failures after less than this are in a row: each doubles the delay before the next start."""
QUICK_PREEMPTION_SECONDS = 5.0
"""So are preemptions: a process that is killed whenever it starts (out of memory, say) must not burn the machine."""
ETCD_SECONDS = 2.0
"""So long etcd may keep this process from looking after its children."""
LATE_SECONDS, LATE_EVERY_SECONDS = 0.5, 1.0
"""The same, for what could not be done at once and is tried again; and how often."""


FROZEN_SECONDS, STUCK_SECONDS = 5.0, 30.0
"""A stopped child is replaced so long after its lease has ended; one that runs gets time to end by itself."""


@dataclass(slots=True)
class Child:
    """One role of the job on this machine, over all of its processes."""

    role: str
    index: int
    process: subprocess.Popen[bytes] | Forked | None = None
    failures: int = 0
    preemptions: int = 0
    in_a_row: int = 0
    stuck: int = 0
    """Failures since the job last made progress."""
    failed_at: int = -1
    started_at: float = 0.0
    restart_at: float | None = None
    registered: int = 0
    """Its process that was registered last."""
    gone_at: float | None = None
    """Since when that process is not registered any more."""
    done: bool = False

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(slots=True)
class Report:
    """How the job ended, as far as this machine's processes tell."""

    failed: str = ""
    failures: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)


class Supervisor:
    """Keeps a set of role processes running until the job is over.

    A child that dies is noticed at once (a thread waits for each), its lease is revoked, so that the others need
    not wait for it to expire, and it is started again: immediately after a preemption, with a growing delay after
    failures. A child may fail `max_restarts` times without progress of the job in between.
    """

    def __init__(self, job_dir: Path, keys: Keys, etcd: Etcd, endpoints: str, environment: Mapping[str, str],
                 max_restarts: int = 3, restart: bool = True, standby: Standby | None = None) -> None:
        self.job_dir, self.keys, self.etcd, self.endpoints = job_dir, keys, etcd, endpoints
        self.environment, self.max_restarts, self.restart = environment, max_restarts, restart
        self.children: dict[tuple[str, int], Child] = {}
        self._standby = standby
        self._next_standby: float | None = None
        self.events = Events(etcd, keys, "launcher")
        self.report = Report()
        self._progress = self._applied = 0
        self._unrevoked: list[tuple[Child, int]] = []
        """Dead processes (by pid) whose leases could not be revoked, as etcd was away."""
        self._revoke_at = 0.0
        self._exits: queue.Queue[tuple[Child, subprocess.Popen[bytes] | Forked, int]] = queue.Queue()

    @property
    def view(self) -> JobView:
        """The job's control records now. Raises EtcdUnreachable."""
        return self._view(ETCD_SECONDS)

    def _view(self, deadline: float) -> JobView:
        return read_view(self.keys, self.etcd.range(self.keys.control, deadline=deadline).kvs)

    def take_progress(self, step: int, applied: int) -> None:
        """Tells the job's step, and how many updates the shards have applied since they started.

        Steps that are repeated are no progress, and neither are steps without data, because all of it is poison.
        """
        if step > self._progress and applied != self._applied:
            self._progress, self._applied = step, applied

    def add(self, role: str, index: int) -> Child:
        """Starts one more role."""
        child = self.children[role, index] = Child(role, index)
        self._start(child)
        return child

    def signal(self, role: str, index: int, signum: int) -> bool:
        """Sends a signal to a role's process; False if there is none now."""
        child = self.children.get((role, index))
        if child is None or child.process is None or child.process.poll() is not None:
            return False
        child.process.send_signal(signum)
        return True

    def step(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for something to happen, and deals with it."""
        now = time.monotonic()
        pending = [c.restart_at - now for c in self.children.values() if c.restart_at is not None]
        try:
            child, process, status = self._exits.get(timeout=max(0.0, min([timeout, *pending])))
            self._ended(child, process, status)
        except queue.Empty:
            pass
        for child in self.children.values():
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                self._start(child)
        if self._unrevoked and time.monotonic() >= self._revoke_at:
            self._revoke_late()
        if self._next_standby is not None and time.monotonic() >= self._next_standby:
            self._next_standby = None
            self._standby = Standby(self.job_dir, self.environment)

    def replace_frozen(self, registered: Collection[int]) -> None:
        """Ends children that no longer hold a lease and yet do not end by themselves, as a running process would.

        `registered`: ids of this machine's processes that are registered now, as etcd has just said. Without this, a
        pserver that somebody stopped for good would keep the job waiting for ever.
        """
        now = time.monotonic()
        for child in self.children.values():
            process = child.process
            if process is None or process.poll() is not None or not process.pid:
                continue
            if process.pid in registered:
                child.registered, child.gone_at = process.pid, None
            elif child.registered == process.pid:
                child.gone_at = child.gone_at or now
                if now - child.gone_at > (FROZEN_SECONDS if _stopped(process.pid) else STUCK_SECONDS):
                    log.warning("%s has lost its lease and does not end: killing it", child.name)
                    process.kill()

    @property
    def all_done(self) -> bool:
        return all(c.done for c in self.children.values())

    def stop(self, grace: float = 10.0) -> None:
        """Ends all children, stopped ones too: SIGTERM, then SIGKILL after `grace` seconds. Their leases end as well,
        so that an etcd that others use, too, does not take them for alive when the job is started again."""
        children = [c for c in self.children.values() if c.process is not None and c.process.poll() is None]
        running = [c.process for c in children if c.process is not None]
        for child in self.children.values():
            child.restart_at = None
        if self._standby is not None:
            self._standby.close()
        for process in running:
            process.terminate()
            process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + grace
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child, process in zip(children, running, strict=True):
            if not self._try_revoke(child, process.pid, LATE_SECONDS):
                break

    def close(self) -> None:
        self.stop(grace=2.0)

    # -- one child ----------------------------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        child.restart_at = None
        child.started_at = time.monotonic()
        log_file = self.job_dir / "logs" / f"{child.role}-{child.index}.log"
        process = child.process = self._fork(child, log_file) or start_role(
            [child.role, "--job", str(self.job_dir), "--etcd", self.endpoints, "--index", str(child.index)], log_file,
            self.environment)
        threading.Thread(target=lambda: self._exits.put((child, process, process.wait())), daemon=True).start()

    def _fork(self, child: Child, log_file: Path) -> Forked | None:
        """This role, made by the standby; None if there is none. One that died is replaced a little later."""
        if self._standby is None:
            return None
        try:
            return self._standby.fork(child.role, child.index, self.endpoints, log_file)
        except OSError:
            log.warning("the standby is dead; see %s", self.job_dir / "logs" / "standby.log")
            self._standby.close()
            self._standby = None
            self._next_standby = time.monotonic() + STANDBY_AFTER_SECONDS
            return None

    def _ended(self, child: Child, process: subprocess.Popen[bytes] | Forked, status: int) -> None:
        if not process.pid:  # the standby died before it made it
            self._start(child)
            return
        if status == EXIT_OK:
            child.done = True
            return
        self._revoke(child, process.pid)
        what, preempted = describe_exit(status), was_preempted(status)
        if preempted:
            child.preemptions += 1
        else:
            child.failures += 1
            child.stuck = child.stuck + 1 if self._progress <= child.failed_at else 1
            child.failed_at = self._progress
        quick = QUICK_PREEMPTION_SECONDS if preempted else QUICK_FAILURE_SECONDS
        child.in_a_row = child.in_a_row + 1 if time.monotonic() - child.started_at < quick else 1
        for counts, count in ((self.report.failures, child.failures), (self.report.preemptions, child.preemptions)):
            if count:
                counts[child.name] = count
        if not self.restart:
            self._give_up(child, f"{child.name} died ({what}), and the job has no fault tolerance (ft=False)")
        elif status == EXIT_USAGE:
            self._give_up(child, f"{child.name} cannot start ({what})")
        elif child.stuck > self.max_restarts:
            self._give_up(child, f"{child.name} failed {child.stuck} times in a row, --max-restarts is "
                                 f"{self.max_restarts}")
        else:
            delay = 0.0 if preempted and child.in_a_row == 1 else min(
                BACKOFF_SECONDS * 2 ** min(child.in_a_row - 1, 10), BACKOFF_LIMIT)
            child.restart_at = time.monotonic() + delay
            self.events.emit("died", f"{child.name} died ({what}), starting it again",
                             role=child.role, index=child.index, status=status)

    def _give_up(self, child: Child, why: str) -> None:
        child.done = True
        tail = self.tail_of_log(child)
        self.report.failed = self.report.failed or why + (f"\n{tail}" if tail else "")
        self.events.emit("failed", why)

    def tail_of_log(self, child: Child, lines: int = 15) -> str:
        path = self.job_dir / "logs" / f"{child.role}-{child.index}.log"
        text = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([f"last lines of {path}:", *("  " + plain_text(t) for t in text[-lines:])]) if text else ""

    def _revoke(self, child: Child, pid: int) -> None:
        """Revokes the lease of the dead process, so that its slots and chunks are free at once.

        If etcd does not answer, later: renewals that are on their way may reach it when it comes back, and would keep
        the dead one's place taken for one more TTL.
        """
        if not self._try_revoke(child, pid, ETCD_SECONDS):
            self._unrevoked.append((child, pid))
            self._revoke_at = time.monotonic() + LATE_EVERY_SECONDS

    def _revoke_late(self) -> None:
        while self._unrevoked and self._try_revoke(*self._unrevoked[0], LATE_SECONDS):
            self._unrevoked.pop(0)
        self._revoke_at = time.monotonic() + LATE_EVERY_SECONDS

    def _try_revoke(self, child: Child, pid: int, deadline: float) -> bool:
        try:
            view = self._view(deadline)
            for record in _registrations(view, child):
                lease = view.leases[record.id]
                if (record.pid, record.host) == (pid, socket.gethostname()) and lease:
                    self.etcd.lease_revoke(lease, deadline=deadline)
            return True
        except EtcdError as error:
            log.warning("cannot revoke the lease of %s: %s", child.name, error.message)
            return False


def _stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _registrations(view: JobView, child: Child) -> list[Registration]:
    """What processes of this role have registered; ids begin with the index."""
    if child.role == "pserver":
        return [record for index, record in view.pservers.items() if index == child.index]
    return [record for name, record in view.trainers.items() if name.startswith(f"{child.index}-")]
