"""What a process tells its job of itself: that it is there, that it lives, how far it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from graphft.errors import GraphftError, UsageError
from graphft.ops.context import SessionPort
from graphft.runtime.coordination.connect import JobEnded
from graphft.runtime.coordination.job_view import out_of_reach, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Registration
from graphft.runtime.etcd import KV, LeaseLost, absent, put_op, value_is
from graphft.runtime.etcd.lease_keeper import LATE
from graphft.runtime.process.progress import Progress
from graphft.runtime.roles.process_end import ProcessEnd

log = logging.getLogger("graphft")

WAIT_NOTICE_SECONDS, WAIT_AGAIN_SECONDS = 5.0, 60.0
"""After which a wait is told, and told again."""
REPORT_SECONDS = 0.4


def _over(kvs: Mapping[str, KV], keys: Keys) -> bool:
    return keys.state in kvs and kvs[keys.state].value != b"running"


class MemberSession(SessionPort):
    """The SessionPort of every role. `status`: gives its report, which is written to etcd."""

    def __init__(self, member: Member, end: ProcessEnd, status: Callable[[], msgspec.Struct]) -> None:
        self.member, self.end, self.status = member, end, status
        self._report_at = 0.0
        self._registered = ""
        self._kept = 0
        """How many renewals by the lease's keeper were told."""
        self.beside: list[tuple[Progress, Callable[[], None]]] = []
        """Marks of other threads that work, and what is called when one of them hangs."""

    @property
    def registered(self) -> bool:
        """Whether others find this process."""
        return bool(self._registered)

    # -- registration -------------------------------------------------------------------------------------------

    def register(self, *, role: str, index: int, lease: bool) -> None:
        """Claims this process's key; waits while a live process holds it. Raises JobEnded when the job is over."""
        member, keys = self.member, self.member.keys
        key = keys.registration(role, index, member.id)
        record = member.registration()
        member.await_view(
            lambda kvs: not out_of_reach(record, read_view(keys, kvs.values())), member.config.lease_ttl + 1.0
        )  # what is in the way may be dead
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

    def check_registered(self) -> None:
        """Raises LeaseLost if this process's registration is gone, though its lease is not: etcd was restored from a
        backup of the time between the two, and nobody would find this process any more."""
        member = self.member
        if self._registered and member.lease and member.id not in member.view.leases:
            kv = member.etcd.get(self._registered)  # the view may be behind
            if kv is None or kv.lease != member.lease:
                raise LeaseLost(
                    f"{self._registered} is gone: etcd was restored from a backup", rule="etcd-lease", help="start anew"
                )

    def _check_reach(self, me: Registration) -> None:
        """Raises GraphftError[out-of-reach]. Whichever of two processes looks later sees both."""
        keys = self.member.keys
        if why := out_of_reach(me, read_view(keys, self.member.etcd.range(keys.control).kvs)):
            raise UsageError(
                why,
                rule="out-of-reach",
                help="give all roles etcd's address in the network that they share (not 127.0.0.1), or "
                "set GRAPHFT_HOST where pservers run",
            )

    def wait_pservers(self, count: int, timeout: float) -> None:
        """Returns when they are there, or when the job is over, whose pservers may be gone already."""
        keys = self.member.keys
        here = self._await(
            lambda kvs: sum(k.startswith(keys.pservers) for k in kvs) >= count or _over(kvs, keys),
            timeout,
            lambda: (
                f"{count} pservers, of which {len(self.member.view.pservers)} are there; start the missing ones: "
                "graphft start pserver --job DIR --etcd ..."
            ),
        )
        if not here:
            raise GraphftError(
                f"waited {timeout:.0f} s for {count} pservers, {len(self.member.view.pservers)} are there",
                rule="wait-pservers",
                help="start the missing ones; `graphft status` shows who is alive",
            )

    def find_coordinator(self, timeout: float) -> None:
        """Returns when there is one, or when the job is over."""
        keys = self.member.keys
        here = self._await(
            lambda kvs: keys.coordinator_addr in kvs or _over(kvs, keys),
            timeout,
            lambda: "a coordinator; start one: graphft start coordinator --job DIR --etcd ...",
        )
        if not here:
            raise GraphftError(
                f"waited {timeout:.0f} s for a coordinator, and none serves",
                rule="find-coordinator",
                help="start one: graphft start coordinator --job DIR --etcd ...; `graphft status` shows who is alive",
            )

    def _await(self, ready: Callable[[Mapping[str, KV]], bool], timeout: float, what: Callable[[], str]) -> bool:
        """Whether that is so within `timeout` seconds. A wait for what others start is told, and told again."""
        end, pause = time.monotonic() + timeout, WAIT_NOTICE_SECONDS
        while (left := end - time.monotonic()) > 0:
            if self.member.await_view(ready, min(left, pause)):
                return True
            if left > pause:
                log.warning("waiting for %s", what())
            pause = WAIT_AGAIN_SECONDS
        return False

    # -- life ---------------------------------------------------------------------------------------------------

    def keep_alive(self, progress_timeout: float) -> None:
        """Renews the lease when it is time to, and sees to it that its keeper does when this thread cannot.

        Ends the process if its main thread hangs.
        """
        progress, lease = self.member.progress, self.member.session
        progress.usual = progress_timeout
        for other, hung in self.beside:  # first: the main thread may wait for what such a one holds
            other.usual = progress_timeout
            if other.hung():
                hung()
        if progress.hung():
            self.end.hung()
        if lease is not None:
            lease.tick()
            lease.keep(self.member.etcd.urls)
            self.check_registered()
            self._tell_kept(int(lease.page.kept))

    def _tell_kept(self, renewals: int) -> None:
        """Says that the daemon thread could not renew for a while: something held the interpreter's lock."""
        if renewals > self._kept:
            log.info(
                "this process could not renew its lease for %.0f s or longer; its keeper did",
                (renewals - self._kept) * LATE * self.member.config.lease_ttl,
            )
        self._kept = renewals

    def report_status(self, last: bool = False) -> None:
        """Writes what this process does, some times a second: the daemon also wakes for whatever changes in etcd."""
        member, now = self.member, time.monotonic()
        if now < self._report_at and not (last or member.view.over):
            return
        self._report_at = now + REPORT_SECONDS
        key = member.keys.status_of(member.kind, str(member.index) if member.kind == "pserver" else member.id)
        member.etcd.put(key, msgspec.json.encode(self.status()), member.lease, deadline=1.0)
