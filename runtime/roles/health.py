"""`graphft start` under a scheduler that starts a role again: it answers probes, and ends as the scheduler expects.

    GET /healthz    200: the main thread gets on, and the lease holds; also while it starts, and when the job is over
    GET /readyz     200: it is registered, and a pserver serves

Anything else is 503, with the reason as text. Off by default: `graphft start --health HOST:PORT`."""

from __future__ import annotations

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.coordination.job_files import is_complete
from graphft.runtime.process.http_server import REQUEST_SECONDS, BoundedServer
from graphft.runtime.process.interrupts import Asked
from graphft.runtime.process.role_process import EXIT_OK, end_by

if TYPE_CHECKING:
    from graphft.runtime.roles.role import Role


class Health:
    """The health of this process. `process`: its role, once it is made. `over`: the job is complete."""

    def __init__(self) -> None:
        self.process: Role | None = None
        self.over = False

    def watch(self, role: Role) -> None:
        self.process = role

    def answer(self, path: str) -> tuple[int, str]:
        """Returns HTTP status and text."""
        if path not in ("/healthz", "/readyz"):
            return 404, f"there is no {path}, but /healthz and /readyz"
        wrong = self._dead() or (self._unready() if path == "/readyz" else "")
        return (503, wrong) if wrong else (200, self._doing())

    def _dead(self) -> str:
        role = self.process
        if role is None or self.over or role.end.closing.is_set():
            return ""
        session, progress = role.member.session, role.member.progress
        if session is not None and not session.alive():
            return "the lease is lost"
        idle = time.monotonic() - progress.last
        if idle > progress.limit:
            return f"no progress for {idle:.0f} s while {progress.doing}, limit {progress.limit:.0f} s"
        return ""

    def _unready(self) -> str:
        if self.over:
            return ""
        if self.process is None or self.process.end.closing.is_set():
            return "starting" if self.process is None else "ending"
        return self.process.unready()

    def _doing(self) -> str:
        if self.over or self.process is None:
            return "the job is over" if self.over else "starting"
        step = "" if self.process.at_step is None else f" at step {self.process.at_step}"
        return f"{self.process.kind} {self.process.member.index}{step}: {self.process.member.progress.doing}"


class Attendance:
    """One role's process, from its start on. `health`: where it is told, "" for nowhere. `stay`: the process of a
    complete job waits for SIGTERM, for a scheduler that starts again whatever ends. `leave_status`: that of a role that
    ends in order before the job is complete, for a scheduler that takes 0 for done."""

    def __init__(self, health: str, stay: bool, leave_status: int) -> None:
        self.health, self.stay, self.leave_status = Health(), stay, leave_status
        if os.getpid() == 1:  # of a container: what it does not handle, the kernel does not deliver
            signal.signal(signal.SIGTERM, lambda *_: end_by(signal.SIGTERM))
        if health:
            serve_health(self.health, health)

    def end(self, status: int, job_dir: Path) -> int:
        """Returns the exit status of a process whose role has ended with `status`, when it is to end."""
        if status != EXIT_OK:
            return status
        if not is_complete(job_dir):
            return self.leave_status
        self.health.over = True
        self.health.process = None
        if self.stay:
            Asked(signal.SIGTERM).wait()
        return EXIT_OK


def serve_health(health: Health, address: str) -> int:
    """Answers at `HOST:PORT` from a thread of its own, as long as this process lives. Returns the port (0: any)."""
    host, _, port = address.rpartition(":")

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            status, text = health.answer(self.path)
            body = f"{text}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    try:
        server = BoundedServer((host, int(port)), Handler)
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"health cannot be served at {address}: {error}",
            rule="health",
            help="give --health HOST:PORT an IPv4 address of this machine and a free port; 0.0.0.0 is every one",
        ) from error
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return int(server.server_address[1])
