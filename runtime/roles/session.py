"""A process's session: its registration, its lease, its reports; and how it ends when it must not go on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.connect import JobEnded
from graphft.runtime.coordination.job_files import has_model
from graphft.runtime.coordination.job_view import out_of_reach, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Registration
from graphft.runtime.etcd import KV, LeaseLost, absent, put_op, value_is
from graphft.runtime.process.progress import Progress, stacks
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_LEASE_LOST, EXIT_OK

log = logging.getLogger("graphft")

WAIT_NOTICE_SECONDS, WAIT_AGAIN_SECONDS = 5.0, 60.0
"""After which a wait is told, and told again."""
REPORT_SECONDS = 0.4


class ProcessEnd:
    """Ends the process when it must not go on. Used by the daemon thread, and by main loops (`check_lease`). `closing`:
    the role ends in order, nothing ends it any more. `before` is called when the process has said why it ends.
    `watched`: the marks of threads that work, and who is told of a hang, with for how long and while what."""

    def __init__(self, member: Member, job_dir: Path) -> None:
        self.member, self.job_dir = member, job_dir
        self.closing = threading.Event()
        self.before: list[Callable[[], None]] = []
        self.watched: dict[Progress, Callable[[str], None]] = {member.progress: lambda _: None}

    def look_for_hangs(self, progress_timeout: float) -> None:
        for progress, tell in reversed([*self.watched.items()]):  # the main thread may wait for what another holds
            progress.usual = progress_timeout
            if progress.hung():
                self._hung(progress, tell)

    def _hung(self, progress: Progress, tell: Callable[[str], None]) -> None:
        """Ends the process, of which a thread is stuck; its launcher starts it again. Others could not go on: the
        daemon thread would renew the lease, and with it the claims, for ever."""
        if self.closing.is_set():
            return
        member = self.member
        what = f"no progress for {progress.limit:.0f} s while {progress.doing}"
        log.error(
            "%s: ending this process. If a batch may take so long, raise chunk_timeout, which is %g s. It is here:\n%s",
            what,
            member.config.chunk_timeout,
            stacks(progress.thread),
        )
        try:
            where = stacks(progress.thread, depth=6)
            member.events.emit("hung", f"{member.kind} {member.index} made {what}: ending it", where=where)
            tell(what)
        except GraphftError as error:
            log.warning("%s", error.message)
        self.now(EXIT_OK if has_model(self.job_dir) else EXIT_FAILED)

    def lease_lost(self, error: LeaseLost) -> None:
        """Ends the process at once: its claims may be somebody else's by now, or the job's etcd has ended."""
        if not self.closing.is_set():
            log.error("lease lost: %s", error.message)
            self.now(EXIT_OK if has_model(self.job_dir) else EXIT_LEASE_LOST)

    def check_lease(self) -> None:
        """For main loops: the daemon thread, which looks as well, may be what hangs."""
        try:
            self.member.check_lease()
        except LeaseLost as error:
            self.lease_lost(error)

    def now(self, status: int) -> None:
        for call in self.before:
            call()
        logging.shutdown()
        os._exit(status)


def _over(kvs: Mapping[str, KV], keys: Keys) -> bool:
    return keys.state in kvs and kvs[keys.state].value != b"running"


class MemberSession:
    """The session of every role. `status`: returns its report, which is written to etcd."""

    def __init__(self, member: Member, end: ProcessEnd, status: Callable[[], msgspec.Struct]) -> None:
        self.member, self.end, self.status = member, end, status
        self._report_at = 0.0
        self._registered = ""

    @property
    def registered(self) -> bool:
        """True if others find this process."""
        return bool(self._registered)

    def register(self, *, role: str, index: int, lease: bool) -> None:
        """Claims this process's key; waits while a live process holds it. Raises JobEnded when the job is over."""
        member, keys = self.member, self.member.keys
        key = keys.registration(role, index, member.id)
        record = member.registration()
        put = put_op(key, msgspec.json.encode(record), member.lease if lease else 0)
        told = False
        while not member.etcd.txn([absent(key), value_is(keys.state, b"running")], [put], token=key).ok:
            state = member.etcd.get(keys.state)
            if state is not None and state.value == b"failed":
                raise GraphftError(f"job {keys.job} failed", rule="job-failed", help="see its events")
            if state is not None and state.value != b"running":
                raise JobEnded(f"job {keys.job} is complete", rule="job-complete")
            if not told:
                log.info("%s is held by a live process, waiting for it to go", key)
                told = True
            member.await_view(lambda kvs: key not in kvs or _over(kvs, keys), WAIT_NOTICE_SECONDS)
            member.check_lease()
        self._check_reach(record)
        self._registered = key
        reached = f": others reach this process at {member.address}" if member.address else ""
        log.info("registered as %s%s", member.id, reached)

    def _check_reach(self, record: Registration) -> None:
        """Raises UsageError if this process and another cannot reach each other. Whichever registers later sees both;
        one that is in the way may be dead until its lease ends."""
        member, end = self.member, time.monotonic() + self.member.config.lease_ttl + 1.0
        while why := out_of_reach(record, read_view(member.keys, member.etcd.range(member.keys.control).kvs)):
            if time.monotonic() > end:
                raise UsageError(
                    why,
                    rule="out-of-reach",
                    help="give all roles etcd's address in the network that they share (not 127.0.0.1), or "
                    "set GRAPHFT_HOST where pservers run",
                )
            member.progress.beat()
            time.sleep(REPORT_SECONDS)

    def _check_registered(self) -> None:
        """Raises LeaseLost if only the lease is left, in an etcd that was restored: nobody would find this process."""
        member, what = self.member, f"{self._registered} is gone: etcd was restored from a backup"
        if self._registered and member.lease and member.id not in member.view.leases:
            kv = member.etcd.get(self._registered)  # the view may be behind
            if kv is None or kv.lease != member.lease:
                raise LeaseLost(what, rule="etcd-lease", help="start anew")

    def wait_pservers(self, count: int, timeout: float) -> None:
        keys = self.member.keys
        self._await(
            lambda kvs: sum(k.startswith(keys.pservers) for k in kvs) >= count,
            timeout,
            lambda: f"{count} pservers, of which {len(self.member.view.pservers)} are there",
            "wait-pservers",
            "graphft start pserver --job DIR --etcd ...",
        )

    def find_coordinator(self, timeout: float) -> None:
        self._await(
            lambda kvs: self.member.keys.coordinator_addr in kvs,
            timeout,
            lambda: "a coordinator, and none serves",
            "find-coordinator",
            "graphft start coordinator --job DIR --etcd ...",
        )

    def _await(
        self, ready: Callable[[Mapping[str, KV]], bool], timeout: float, what: Callable[[], str], rule: str, start: str
    ) -> None:
        """Returns when that is so, or when the job is over. A wait for a process is told, and told again."""
        keys, end, pause = self.member.keys, time.monotonic() + timeout, WAIT_NOTICE_SECONDS
        while (left := end - time.monotonic()) > 0:
            if self.member.await_view(lambda kvs: ready(kvs) or _over(kvs, keys), min(left, pause)):
                return
            if left > pause:
                log.warning("waiting for %s; start what is missing: %s", what(), start)
            pause = WAIT_AGAIN_SECONDS
        raise GraphftError(
            f"waited {timeout:.0f} s for {what()}",
            rule=rule,
            help=f"start what is missing: {start}; `graphft status` shows who is alive",
        )

    def keep_alive(self, progress_timeout: float) -> None:
        """Renews the lease when it is time to, and sees to it that its keeper does when this thread cannot. Ends the
        process if it hangs."""
        lease = self.member.session
        self.end.look_for_hangs(progress_timeout)
        if lease is not None:
            lease.tick()
            lease.keep(self.member.etcd.urls)
            self._check_registered()

    def report_status(self, last: bool = False) -> None:
        """Writes this process's report, some times a second: the daemon also wakes for whatever changes in etcd."""
        member, now = self.member, time.monotonic()
        if now < self._report_at and not (last or member.view.over):
            return
        self._report_at = now + REPORT_SECONDS
        key = member.keys.status_of(member.kind, str(member.index) if member.kind == "pserver" else member.id)
        member.etcd.put(key, msgspec.json.encode(self.status()), member.lease, deadline=1.0)
