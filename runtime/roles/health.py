"""What a scheduler may ask a role over HTTP: whether it lives, and whether others can count on it.

    GET /healthz    200: the main thread gets on, and the lease holds; also while it starts, and when the job is over
    GET /readyz     200: it is registered, and a pserver serves

Anything else is 503, with the reason as text. A process that is cut off from etcd, or hangs, ends itself; the answer
is for what it cannot see of itself. Off by default: `graphft start --health HOST:PORT`.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any

from graphft.errors import UsageError

if TYPE_CHECKING:
    from graphft.runtime.roles.role import Role

log = logging.getLogger("graphft")

REQUEST_SECONDS = 5.0
"""For which a client may take to ask."""


class Health:
    """What is known of this process. `process`: its role, once it is made. `over`: the job is complete."""

    def __init__(self) -> None:
        self.process: Role | None = None
        self.over = False

    def answer(self, path: str) -> tuple[int, str]:
        """HTTP status and text."""
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


class _Server(ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A probe that has given up waiting is the scheduler's news, and no traceback in the role's log."""
        given_up = isinstance(sys.exc_info()[1], ConnectionError | TimeoutError)
        log.log(logging.DEBUG if given_up else logging.ERROR, "a probe could not be answered", exc_info=True)


def serve_health(health: Health, address: str) -> int:
    """Answers at `HOST:PORT` from a thread of its own, as long as this process lives. Returns the port (0: any)."""
    host, port = _split(address)

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
            """A probe each few seconds is no news."""

    try:
        server = _Server(host, port, Handler)
    except OSError as error:
        raise UsageError(
            f"health cannot be served at {address}: {error}",
            rule="health",
            help="give --health HOST:PORT an address of this machine and a free port",
        ) from error
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return int(server.server_address[1])


def _split(address: str) -> tuple[str, int]:
    """Also of an IPv6 host without brackets: what a pod knows of itself has none."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise UsageError(
            f"'{address}' is no address to serve health at",
            rule="health",
            help="give HOST:PORT; 0.0.0.0 is every interface",
        )
    return host.strip("[]"), int(port)
