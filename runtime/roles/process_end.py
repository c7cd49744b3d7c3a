"""How a process ends itself when it must not go on: its lease is lost, or its main thread hangs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from graphft.errors import GraphftError
from graphft.runtime.coordination.job_storage import has_model
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import LeaseLost
from graphft.runtime.process.progress import stacks
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_LEASE_LOST, EXIT_OK

log = logging.getLogger("graphft")


class ProcessEnd:
    """Used by the daemon thread, and by main loops (`check_lease`).

    `closing`: the role ends in order, nothing ends it any more. `before` is called when the process has said why it
    ends; `on_hung`, with for how long and while what, tells others of a hang.
    """

    def __init__(self, member: Member, job_dir: Path) -> None:
        self.member, self.job_dir = member, job_dir
        self.closing = threading.Event()
        self.before: list[Callable[[], None]] = []
        self.on_hung: list[Callable[[str], None]] = []

    def hung(self) -> None:
        """Ends the process, whose main thread is stuck; its launcher starts it again.

        Others could not go on: the daemon thread would renew the lease, and with it the claims, for ever.
        """
        if self.closing.is_set():
            return
        member, progress = self.member, self.member.progress
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
            for tell in self.on_hung:
                tell(what)
        except GraphftError as error:
            log.warning("%s", error.message)
        self.now(EXIT_OK if has_model(self.job_dir) else EXIT_FAILED)

    def lease_lost(self, error: LeaseLost) -> None:
        """Ends the process at once: whatever it claims may be somebody else's by now, or the job's etcd has ended."""
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
