"""A process's membership in its job: its name, etcd under the fence of its run, its lease, and what it watches."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.coordination.run_record import fenced
from graphft.runtime.etcd import KV, Session, Store, TransientEtcdError, Watch
from graphft.runtime.process.identity import identify
from graphft.runtime.process.progress import Progress
from graphft.runtime.transport.address import network_identity
from graphft.runtime.transport.channel import Login

if TYPE_CHECKING:
    from graphft.transpiler.job import Job

log = logging.getLogger("graphft")

RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 1.0
LOOK_SECONDS = 0.5
"""A process that waits for others checks so often if it was asked to go."""
T = TypeVar("T")


class Member:
    """One process of a job. Its methods may be called from any thread, but for `close`.

    `changed` is set, and `wake` called, when the view has changed. `address`: where others reach it; "" if they do not.
    A role sets `wake`, which interrupts the main thread's wait, and `leaving`: True once it was asked to go.
    """

    def __init__(
        self, kind: str, index: int, etcd: Store, job: Job, progress: Progress, session: Session | None = None
    ) -> None:
        self.kind, self.index, self.job, self.config = kind, index, job, job.config
        self.keys = Keys(self.config.name)
        self.etcd = fenced(etcd, self.keys, job)
        self.login = Login(admits=lambda public: public in self.view.public_keys)
        self.id = f"{index}-{uuid.uuid4().hex[:8]}"
        self.address = ""
        self.events = Events(self.etcd, self.keys, f"{kind} {index}")
        self.session, self.progress = session, progress
        self.changed = threading.Event()
        self.wake: Callable[[], object] = bool
        self.leaving: Callable[[], bool] = bool
        self._view: tuple[int, JobView] = (-1, JobView())
        self.watcher = Watch(etcd, self.keys.control, self._notify)

    def _notify(self) -> None:
        self.changed.set()
        self.wake()

    def registration(self) -> Registration:
        where = os.getpid(), socket.gethostname(), network_identity()
        return Registration(self.id, self.address, *where, identify(), self.login.keys.public)

    # -- the lease ----------------------------------------------------------------------------------------------

    @property
    def lease(self) -> int:
        """The lease of this process's keys; 0 without fault tolerance."""
        return self.session.lease if self.session is not None else 0

    def check_lease(self) -> None:
        """Raises LeaseLost unless the lease is certain to live."""
        if self.session is not None:
            self.session.check()

    def retry_while_leased(self, call: Callable[[], T]) -> T:
        """Makes `call()`, which may be repeated, again while etcd does not answer or is full, as long as the lease is
        certain to live. Raises at once what etcd refuses for good."""
        pause = RETRY_SECONDS
        while True:
            try:
                return call()
            except TransientEtcdError as error:
                self.check_lease()
                self.progress.beat()  # a wait for etcd, which the lease limits
                log.warning("etcd: %s; trying again", error.message)
                time.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    def await_view(self, ready: Callable[[Mapping[str, KV]], bool], seconds: float) -> bool:
        """Returns True if the watched records are `ready` within this time. Raises WorkChanged when this process was
        asked to go: a signal's handler wakes no thread."""
        from graphft.ops.context import WorkChanged  # with torch, which a launcher does without

        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.watcher.wait(ready, min(left, LOOK_SECONDS)):
                return True
            if self.leaving():
                raise WorkChanged
        return False

    # -- the view -----------------------------------------------------------------------------------------------

    def over(self) -> bool:
        """True if the job is complete. Raises GraphftError when it failed, or another run has taken its place."""
        view = self.view
        if view.state == "failed":
            why = f": {view.failure.reason}" if view.failure is not None else ""
            raise GraphftError(
                f"job {self.keys.job} failed{why}", rule="job-failed", help="see its events: graphft status"
            )
        if view.run not in ("", self.job.run_id):
            raise UsageError(
                f"job {self.keys.job} is run {view.run} now, this process is of run {self.job.run_id}",
                rule="foreign-job",
                help="give runs that use one etcd at the same time different names",
            )
        return view.over

    @property
    def view(self) -> JobView:
        """The job as it is watched now; read anew only when something changed."""
        revision, (known, view) = self.watcher.revision, self._view
        if revision != known:
            view = read_view(self.keys, self.watcher.snapshot().values())
            self._view = (revision, view)
        return view

    def close(self) -> None:
        self.watcher.close()
        if self.session is not None:
            self.session.close()
        self.etcd.close()
