"""Starts a job's roles, and starts them again when they die."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from graphft.errors import UsageError, describe, plain_text
from graphft.runtime.coordination.event_log import Events, ProcessLocations
from graphft.runtime.coordination.job_files import has_model
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Ordered
from graphft.runtime.coordination.revoker import ETCD_SECONDS, Revoker
from graphft.runtime.coordination.run_record import WantedPasses
from graphft.runtime.engines.base import Engine, EngineError, Process
from graphft.runtime.etcd import EtcdError, Store
from graphft.runtime.launcher.child import Child, ChildProcesses
from graphft.runtime.launcher.death_analysis import DeathAnalysis
from graphft.runtime.launcher.process_ends import note
from graphft.runtime.process.identity import UNKNOWN, Identity
from graphft.runtime.process.role_process import (
    ERROR_LINES,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    describe_exit,
    error_in,
    was_preempted,
)
from graphft.runtime.process.work_record import Phase

log = logging.getLogger("graphft")

CANNOT_START_SECONDS, AT_WORK_SECONDS = 30.0, 10.0
"""A trainer that cannot start (a source file half saved) is tried again later, if another one has been at work for that
time."""
COLLECT_EVERY_SECONDS = 1.0
KILLED_SECONDS, COLLECT_SECONDS, POLL_SECONDS = 5.0, 10.0, 0.02
"""For so long the ends of a process after SIGKILL, and of what roles have left, are waited for."""
FROZEN_SECONDS, STUCK_SECONDS = 5.0, 30.0
"""From the end of its lease until a stopped child is replaced; one that runs gets time to end by itself."""


class Supervisor:
    """Keeps a set of role processes running until the job is over.

    A child that dies is noticed at once (a thread waits for each), its lease is revoked, and it is started again:
    immediately after a preemption, with a growing delay after failures. A child may fail `max_restarts` times without
    progress of the job in between.

    `look` is called by each step: who runs a launch in a thread of its own ends it by an exception. With
    `replaces_left` a trainer that was asked to leave (SIGTERM) is a preempted one. `passes`: which of the job's are
    wanted, if they are on demand. `failed`: why the job failed, as far as this machine's processes tell.
    """

    def __init__(
        self,
        job_dir: Path,
        keys: Keys,
        etcd: Store,
        endpoints: str,
        engine: Engine,
        max_restarts: int = 3,
        restart: bool = True,
    ) -> None:
        self.job_dir, self.keys, self.etcd, self.endpoints = job_dir, keys, etcd, endpoints
        self.engine, self.max_restarts, self.restart = engine, max_restarts, restart
        self.children: dict[tuple[str, int], Child] = {}
        self.look: Callable[[], None] = lambda: None
        self.replaces_left = False
        self.passes: WantedPasses | None = None
        self.events = Events(etcd, keys, "launcher")
        self.failed = ""
        self._progress = self._applied = 0
        self._revoker = Revoker(etcd, keys)
        self._locations = ProcessLocations(etcd, keys)
        self._deaths = DeathAnalysis(job_dir, keys, etcd, self.events)
        self._child_processes = ChildProcesses()
        self._collect_at = 0.0
        self._exits: queue.Queue[tuple[Child, Process, int]] = queue.Queue()

    @property
    def view(self) -> JobView:
        """The job's control records now. Raises EtcdUnreachable."""
        return read_view(self.keys, self.etcd.range(self.keys.control, deadline=ETCD_SECONDS).kvs)

    @property
    def all_done(self) -> bool:
        return all(c.done for c in self.children.values())

    def take_progress(self, step: int, applied: int) -> None:
        """Takes note of the job's step, and of how many updates the shards have applied since they started: steps that
        are repeated, or without data, are no progress."""
        if step > self._progress and applied != self._applied:
            self._progress, self._applied = step, applied

    def fail(self, why: str) -> None:
        """Ends the job; the first reason counts."""
        self.failed = self.failed or why

    def add(self, role: str, index: int) -> Child:
        """Starts one more role."""
        child = self.children[role, index] = Child(role, index)
        self._start(child)
        return child

    def signal(self, role: str, index: int, signum: int) -> bool:
        """Sends a signal to a role's process; False if there is none now. From any thread."""
        child = self.children.get((role, index))
        if child is None or child.process is None or not child.alive:
            return False
        if child.identity.visible:
            self._child_processes.look([child.identity])
        child.process.send_signal(signum)
        return True

    def step(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for something to happen, and deals with it."""
        self.look()
        now = time.monotonic()
        pending = [c.restart_at - now for c in self.children.values() if c.restart_at is not None]
        with contextlib.suppress(queue.Empty):
            self._ended(*self._exits.get(timeout=max(0.0, min([timeout, *pending]))))
        for child in self.children.values():
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                self._start(child)
        self._revoker.step()
        there = [c.process for c in self.children.values() if c.process is not None and c.alive]
        self._locations.publish([Ordered(p.order.role, p.order.index, p.place, p.pid) for p in there if p.place])
        if now >= self._collect_at:
            self._collect_at = now + COLLECT_EVERY_SECONDS
            self._collect()
        try:
            self.engine.step()
        except UsageError as error:
            self.fail(error.message)

    # -- what the status tells --------------------------------------------------------------------------------------

    def replace_frozen(self, registered: Collection[Identity]) -> None:
        """Ends children that no longer hold a lease and do not end by themselves: a pserver that somebody stopped for
        good would keep the job waiting for ever. `registered`: the processes that etcd has just told."""
        now = time.monotonic()
        for child in self.children.values():
            process = child.process
            if process is None or not child.alive or child.identity == UNKNOWN:
                continue
            if child.identity in registered:
                child.registered, child.gone_at = child.identity, None
            elif child.registered == child.identity:
                child.gone_at = child.gone_at or now
                if now - child.gone_at > (FROZEN_SECONDS if child.stopped else STUCK_SECONDS):
                    log.warning("%s has lost its lease and does not end: killing it", child.name)
                    process.send_signal(signal.SIGKILL)

    def take_back_orders(self) -> None:
        """Ends the wait of processes that the engine has no room for: the job is complete."""
        for child in self.children.values():
            if child.restart_at is not None or child.waits:
                child.done, child.restart_at = True, None
            if child.process is not None and child.waits:
                child.process.send_signal(signal.SIGTERM)

    # -- the end ----------------------------------------------------------------------------------------------------

    def stop(self, grace: float = 2.0) -> None:
        """Ends all children, stopped ones too: SIGTERM, then SIGKILL after `grace` seconds. Their leases end as well,
        so that an etcd that others use, too, does not take them for alive when the job is started again."""
        children = [c for c in self.children.values() if c.alive]
        running = [c.process for c in children if c.process is not None]
        for child in self.children.values():
            child.restart_at = None
        self._collect()
        self.engine.cancel_orders()
        for process in running:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + grace
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._collect()
                process.send_signal(signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # only the kernel can keep it
                    process.wait(KILLED_SECONDS)
        end = time.monotonic() + COLLECT_SECONDS
        self._collect()
        while self._child_processes.left and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            self._collect()
        for child in children:
            if not self._revoker.try_once(child.identity):  # etcd does not answer
                break

    # -- one child --------------------------------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        child.restart_at, child.started_at = None, time.monotonic()
        try:
            process = child.process = self.engine.start(child.order(self.endpoints))
        except UsageError as error:
            self.fail(error.message)
            child.done = True
        except (EngineError, OSError) as error:
            child.await_room()
            log.warning("%s cannot be started (%s); trying again", child.name, describe(error))
        else:
            child.refused, child.identity = 0, process.identity
            threading.Thread(target=self._await_end, args=(child, process), daemon=True).start()

    def _await_end(self, child: Child, process: Process) -> None:
        child.identity = process.await_made()
        self._exits.put((child, process, process.wait()))

    def _collect(self) -> None:
        self._child_processes.look([c.identity for c in self.children.values() if c.identity.visible])

    def _ended(self, child: Child, process: Process, status: int) -> None:
        if child.done:
            return
        if not process.pid:  # it was never made: the fork server died before that
            self._start(child)
            return
        if status == EXIT_OK and self._may_end(child):
            child.done = True
            return
        if status == EXIT_OK and self._phase(child) == Phase.LEFT:
            status = -signal.SIGTERM  # a preemption
        if status in (EXIT_FAILED, EXIT_USAGE) and self._state() == "failed":
            child.done = True  # the job's record says why, and to all of its launchers
            return
        self._died(child, status)

    def _died(self, child: Child, status: int) -> None:
        """Restarts a child whose process ended before its job did, or gives it up."""
        index = child.index if child.role == "trainer" else None
        where, blamed, counts = self._deaths.died(child.name, index, child.identity, status)
        self._revoker.revoke(child.identity)
        what = describe_exit(status) + where
        asked = status == EXIT_OK and child.role == "coordinator"  # by SIGTERM: none of the user's code runs in it
        preempted = (was_preempted(status) or asked) and blamed is None and not counts
        of_batch = blamed is not None or self._phase(child) == Phase.REPORTED
        if preempted:
            child.preempt()
        else:
            # A failure that counts against a batch counts against the process only when the batch is discarded.
            counts = counts is not False or status == EXIT_USAGE
            child.death, child.died_at = f"{child.name} died ({what})", time.monotonic()  # who sees it counted asks how
            child.died_started = child.started_at
            child.fail(self._progress, counts and (blamed is None or blamed.outcome == "discarded"), of_batch)
        note(self.job_dir, "preemption" if preempted else "failure", what, child.name)
        if not self.restart:
            self._give_up(child, f"{child.name} died ({what}), and the job has no fault tolerance (ft=False)")
        elif status == EXIT_USAGE and blamed is None:
            self._cannot_start(child, what)
        elif child.stuck > self.max_restarts:
            why = f"{child.name} failed {child.stuck} times in a row, --max-restarts is {self.max_restarts}"
            why += ": one batch after the other failed, and none in between was computed" * of_batch
            self._give_up(child, why)
        else:
            delay = child.delay(at_once=preempted)
            text = f"{child.name} died ({what}), starting it again" + f" in {delay:.0f} s" * (delay >= 1)
            self.events.emit("died", text, role=child.role, index=child.index, status=status)
            child.restart_in(delay)  # from now on: to tell of it may take a second

    def _cannot_start(self, child: Child, what: str) -> None:
        now = time.monotonic()
        others = (c for c in self.children.values() if c.role == "trainer" == child.role and c is not child)
        if any(c.alive and not c.done and now - c.started_at > AT_WORK_SECONDS for c in others):
            child.restart_in(CANNOT_START_SECONDS)
            text = f"{child.name} cannot start ({what}; see its log): trying again, while other trainers work"
            self.events.emit("cannot-start", text, role=child.role, index=child.index)
            return
        lines = self.engine.logs(child.order(self.endpoints), ERROR_LINES)
        self._give_up(child, f"{child.name} cannot start ({what}){error_in(lines)}")

    def _may_end(self, child: Child) -> bool:
        """Returns True if a process that ended with status 0 was done. User code may have ended it (`os._exit`); and
        for one that was asked to leave another one may be wanted."""
        left = self._phase(child) == Phase.LEFT and not self.replaces_left
        return left or has_model(self.job_dir) or self._state() in ("complete", "failed")

    def _phase(self, child: Child) -> Phase | None:
        return self._deaths.phase(child.index, child.identity) if child.role == "trainer" else None

    def _state(self) -> str:
        """Returns the job's state; "" while etcd does not tell."""
        try:
            return self.view.state
        except EtcdError:
            return ""

    def _give_up(self, child: Child, why: str) -> None:
        child.done = True
        tail = self.tail_of_log(child)
        self.fail(why + (f"\n{tail}" if tail else ""))
        self.events.emit("failed", why)

    def tail_of_log(self, child: Child) -> str:
        lines = self.engine.logs(child.order(self.endpoints), 15)
        head = f"last lines of {self.job_dir / 'logs' / f'{child.role}-{child.index}.log'}:"
        return "\n".join([head, *("  " + plain_text(line) for line in lines)]) if lines else ""
