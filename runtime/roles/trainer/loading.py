"""What a role does while it loads what is slow to load and needs no claim: a lease, which must be renewed, comes later.

A thread reports it (`graphft status`: "trainer 1: loading data, 40 s"), and ends the process when the job is over, or
when it was asked to leave. The report hangs on a lease of its own that nothing else hangs on: it is granted for long,
because user code that loads may hold the interpreter's lock, and it takes the report of a dead process along.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.coordination.job_storage import has_model
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import LoadingStatus
from graphft.runtime.etcd import EtcdError
from graphft.runtime.process.identity import identify
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK, EXIT_USAGE

log = logging.getLogger("graphft")

LOOK_SECONDS = 0.5
"""Between two looks at the job; loading that takes less is not reported."""
REPORT_TTL = 60
"""Seconds for which the report stays when it is not renewed."""


class Loading:
    """`with Loading(...): load()`. `asked` tells whether this process is to leave."""

    def __init__(self, member: Member, job_dir: Path, what: str, asked: Callable[[], bool]) -> None:
        self.member, self.job_dir, self._asked = member, job_dir, asked
        self._report = LoadingStatus(member.kind, what, time.time(), os.getpid(), socket.gethostname(), identify())
        self._lease = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)

    def __enter__(self) -> Loading:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self._withdraw()

    def _run(self) -> None:
        renew_at = 0.0
        while not self._done.wait(LOOK_SECONDS):
            status = self._status_to_end_with()
            if status is not None:
                self._end(status)
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + REPORT_TTL / 6
                self._try_to_tell()

    def _try_to_tell(self) -> None:
        try:
            self._tell()
        except EtcdError as error:  # it is away: the next try tells
            log.warning("etcd: %s", error.message)
        except GraphftError as error:  # another run has taken this one's place
            log.error("%s", error)
            self._end(EXIT_USAGE)

    def _status_to_end_with(self) -> int | None:
        if self._asked():
            log.info("was asked to leave while it loads %s", self._report.what)
            return EXIT_OK
        state = self.member.view.state
        if state in ("complete", "failed") or has_model(self.job_dir):
            log.info("the job is over: no need to load %s", self._report.what)
            return EXIT_FAILED if state == "failed" else EXIT_OK
        return None

    def _tell(self) -> None:
        """Writes the report; a lease that ended meanwhile is granted anew."""
        etcd, key = self.member.etcd, self.member.keys.loading(self.member.kind, self.member.id)
        try:
            if self._lease:
                etcd.lease_keepalive_once(self._lease, deadline=1.0)
                return
        except EtcdError:
            self._lease = 0
        lease, _ = etcd.lease_grant(REPORT_TTL, deadline=1.0)
        etcd.put(key, msgspec.json.encode(self._report), lease, deadline=1.0)
        self._lease = lease

    def _withdraw(self) -> None:
        if self._lease:
            with contextlib.suppress(EtcdError):  # it ends by itself then
                self.member.etcd.lease_revoke(self._lease, deadline=1.0)

    def _end(self, status: int) -> None:
        """At once: the main thread is in code that need not come back soon."""
        self._withdraw()
        logging.shutdown()
        os._exit(status)
