"""What `graphft start` does for a scheduler that starts a role again: it tells its health, and ends as that expects."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from graphft.runtime.coordination.job_storage import is_complete
from graphft.runtime.process.interrupts import Asked
from graphft.runtime.process.role_process import EXIT_OK, end_by
from graphft.runtime.roles.health import Health, serve_health


class Attendance:
    """Of one role's process, from its start on.

    `health`: where it is told, "" for nowhere. `stay`: the process of a complete job waits for SIGTERM, for a scheduler
    that starts again whatever ends. `leave_status`: that of a role that ends in order before the job is complete, for a
    scheduler that takes 0 for done.
    """

    def __init__(self, health: str, stay: bool, leave_status: int) -> None:
        self.health, self.stay, self.leave_status = Health(), stay, leave_status
        if os.getpid() == 1:  # of a container: what it does not handle, the kernel does not deliver
            signal.signal(signal.SIGTERM, lambda *_: end_by(signal.SIGTERM))
        if health:
            serve_health(self.health, health)

    def end(self, status: int, job_dir: Path) -> int:
        """The exit status of a process whose role has ended with `status`; returns when it is to end."""
        if status != EXIT_OK:
            return status
        if not is_complete(job_dir):
            return self.leave_status
        self.health.over = True
        self.health.process = None
        if self.stay:
            Asked(signal.SIGTERM).wait()
        return EXIT_OK
