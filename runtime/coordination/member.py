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

import msgspec

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.connect import JobEnded
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.reach import out_of_reach
from graphft.runtime.coordination.records import Registration
from graphft.runtime.coordination.run_record import fenced, read_secret
from graphft.runtime.etcd import KV, LeaseLost, Session, Store, TransientEtcdError, Watch, absent, put_op, value_is
from graphft.runtime.process.identity import identify
from graphft.runtime.process.progress import Progress
from graphft.runtime.transport.address import network_identity
from graphft.runtime.transport.login import Login

if TYPE_CHECKING:
    from graphft.transpiler import Job

log = logging.getLogger("graphft")

WAIT_NOTICE_SECONDS = 5.0
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 1.0
T = TypeVar("T")


def _over(kvs: Mapping[str, KV], keys: Keys) -> bool:
    return keys.state in kvs and kvs[keys.state].value != b"running"


class Member:
    """One process of a job, as the others see it. Its methods may be called from any thread, but for `close`.

    `changed` is set, and `wake` called, whenever the view changed. `address`: where others reach it; "" if they do not.
    """

    def __init__(
        self, kind: str, index: int, etcd: Store, job: Job, progress: Progress, session: Session | None = None
    ) -> None:
        self.kind, self.index, self.job, self.config = kind, index, job, job.config
        self.keys = Keys(self.config.name)
        self.etcd = fenced(etcd, self.keys, job)
        self.secret = read_secret(etcd, self.keys)
        self.id = f"{index}-{uuid.uuid4().hex[:8]}"
        self.address = ""
        self.events = Events(self.etcd, self.keys, f"{kind} {index}")
        self.session, self.progress = session, progress
        self._registered = ""
        self.changed = threading.Event()
        self._view: tuple[int, JobView] = (-1, JobView())
        self.watcher = Watch(etcd, self.keys.control, lambda _: self._notify())

    @property
    def login(self) -> Login:
        """What this process shows to others of its run, and asks of them."""
        return Login(self.job.run_id, self.secret)

    def _notify(self) -> None:
        self.changed.set()
        self.wake()

    def wake(self) -> None:
        """Interrupts whatever the main thread waits for. Called from other threads."""

    # -- the lease ----------------------------------------------------------------------------------------------

    @property
    def lease(self) -> int:
        """The lease that this process's keys hang on; 0 without fault tolerance."""
        return self.session.lease if self.session is not None else 0

    def check_lease(self) -> None:
        """Raises LeaseLost unless the lease is certain to live."""
        if self.session is not None:
            self.session.check()

    def retry_while_leased(self, call: Callable[[], T]) -> T:
        """`call()`, again while etcd does not answer or is full, for as long as this process may believe in its lease.

        For calls that look before they change: repeating them is safe. What etcd refuses for good (too large, not
        allowed, malformed) is raised at once.
        """
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

    # -- registration -------------------------------------------------------------------------------------------

    def register(self, *, role: str, index: int, lease: bool) -> None:
        """Claims this process's key; waits while a live process holds it. Raises JobEnded when the job is over."""
        key = self.keys.pserver(index) if role == "pserver" else self.keys.trainer(self.id)
        record = Registration(self.id, self.address, os.getpid(), socket.gethostname(), network_identity(), identify())
        self.watcher.wait(
            lambda kvs: not out_of_reach(record, read_view(self.keys, kvs.values())), self.config.lease_ttl + 1.0
        )  # what is in the way may be dead
        put = put_op(key, msgspec.json.encode(record), self.lease if lease else 0)
        told = False
        while not self.etcd.txn([absent(key), value_is(self.keys.state, b"running")], [put], token=key).ok:
            state = self.etcd.get(self.keys.state)
            if state is not None and state.value == b"failed":
                raise GraphftError(f"job {self.keys.job} failed", rule="job-failed", help="see its events")
            if state is not None and state.value != b"running":
                raise JobEnded(f"job {self.keys.job} is complete", rule="job-complete")
            if not told:
                log.info("%s is held by a live process, waiting for it to go", key)
                told = True
            self.watcher.wait(lambda kvs: key not in kvs or _over(kvs, self.keys), WAIT_NOTICE_SECONDS)
            self.check_lease()
        self._check_reach(record)
        self._registered = key
        reached = f": others reach this process at {self.address}" if self.address else ""
        log.info("registered as %s%s", self.id, reached)

    def check_registered(self) -> None:
        """Raises LeaseLost if this process's registration is gone, though its lease is not: etcd was restored from a
        backup of the time between the two, and nobody would find this process any more."""
        if self._registered and self.lease and self.id not in self.view.leases:
            kv = self.etcd.get(self._registered)  # the view may be behind
            if kv is None or kv.lease != self.lease:
                raise LeaseLost(
                    f"{self._registered} is gone: etcd was restored from a backup", rule="etcd-lease", help="start anew"
                )

    def _check_reach(self, me: Registration) -> None:
        """Raises GraphftError[out-of-reach]. Whichever of two processes looks later sees both."""
        if why := out_of_reach(me, read_view(self.keys, self.etcd.range(self.keys.control).kvs)):
            raise UsageError(
                why,
                rule="out-of-reach",
                help="give all roles etcd's address in the network that they share (not 127.0.0.1), or "
                "set GRAPHFT_HOST where pservers run",
            )

    def wait_pservers(self, count: int, timeout: float) -> None:
        """Returns when they are there, or when the job is over, whose pservers may be gone already."""
        prefix = self.keys.pservers
        here = self.watcher.wait(
            lambda kvs: sum(k.startswith(prefix) for k in kvs) >= count or _over(kvs, self.keys), timeout
        )
        if here is None:
            raise GraphftError(
                f"waited {timeout:.0f} s for {count} pservers, {len(self.view.pservers)} are there",
                rule="wait-pservers",
                help="start the missing ones; `graphft status` shows who is alive",
            )

    # -- the view -----------------------------------------------------------------------------------------------

    def over(self) -> bool:
        """Whether the job is. Raises GraphftError when it failed, or another run has taken its place."""
        view = self.view
        if view.state == "failed":
            raise GraphftError(f"job {self.keys.job} failed", rule="job-failed", help="see its events: graphft status")
        if view.run not in ("", self.job.run_id):
            raise UsageError(
                f"job {self.keys.job} is run {view.run} now, this process is of run {self.job.run_id}",
                rule="foreign-job",
                help="give runs that use one etcd at the same time different names",
            )
        return view.over

    @property
    def view(self) -> JobView:
        """The job as it is watched now; read anew only when something changed. From any thread."""
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
