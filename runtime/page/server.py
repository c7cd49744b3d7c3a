"""Serves the page of a job over HTTP on this machine's loopback, to GET alone.

    /                      the page
    /status.json           what it shows
    /metrics               the same for Prometheus
    /healthz               200

Everything comes from here, and the Content-Security-Policy allows nothing else. A request must name this machine as its
host: else a web page elsewhere could have its own name point here and read what only this machine is to see.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from graphft.errors import UsageError, describe
from graphft.runtime.page.job_page import JobPage
from graphft.runtime.page.prometheus import CONTENT_TYPE, metrics_of

log = logging.getLogger("graphft")

LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d*)?|::1")
"""A request may call this machine so. The port may be another one: ssh -L forwards one to this."""
REQUEST_SECONDS = 5.0
"""For which a client may be silent."""
POLL_SECONDS = 0.1
WATCHED_SECONDS, LAST_LOOK_SECONDS = 3.0, 4.0
"""The page is looked at if it was asked for so shortly before the end; then that waits so long to be asked for."""
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Answer = tuple[int, str, bytes]
"""Status, content type, body."""


def answer(page: JobPage, path: str) -> Answer:
    """Answers a request for this path, without its query."""
    name = path.removeprefix("/")
    if name in ("", *_FILES):
        file = name or "page.html"
        return 200, _FILES[file], Path(__file__).with_name(file).read_bytes()
    if name == "healthz":
        return _plain(200, "ok")
    if name == "status.json":
        return 200, "application/json", page.json()
    if name == "metrics":
        return 200, CONTENT_TYPE, metrics_of(page.document())
    return _plain(404, f"there is no {path}, but /, /status.json, /metrics and /healthz")


def _plain(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


class PageServer:
    """Answers from a thread of its own. Raises UsageError if there is no such port here, or it is taken."""

    def __init__(self, page: JobPage, port: int = 0) -> None:
        self.page, self.answered_at = page, float("-inf")
        """`answered_at`: when `status.json` was last asked for by somebody who has got the answer (monotonic)."""
        handler = type("Handler", (_Handler,), {"owner": self})
        try:
            self._server = _Server((LOOPBACK, port), handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"the page cannot be served at {LOOPBACK}:{port}: {error}",
                rule="page",
                help="give another port, or none: a free one is taken then",
            ) from error
        self.port = int(self._server.server_address[1])
        self.url = f"http://{LOOPBACK}:{self.port}/"
        threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), name="page", daemon=True).start()

    def show_end(self) -> None:
        """Waits a moment, so that a page that is open shows how the job ended."""
        now = time.monotonic()
        end = now + LAST_LOOK_SECONDS if now < self.answered_at + WATCHED_SECONDS else now
        while self.answered_at <= now and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for the page could not be answered", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    owner: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "graphft", ""

    def do_GET(self) -> None:
        path, asked_at = self.path.partition("?")[0], time.monotonic()
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or _HOST.fullmatch(hosts[0].strip().lower()) is None:
            self._send(_plain(421, "this is served to its own machine alone: ask for 127.0.0.1 or localhost"))
            return
        try:
            found = answer(self.owner.page, path)
        except Exception as error:
            log.warning("%s of the page cannot be answered", path, exc_info=True)
            found = _plain(500, f"{path} cannot be answered: {describe(error)}")
        self._send(found)
        if path.endswith("status.json"):
            self.owner.answered_at = max(asked_at, self.owner.answered_at)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses requests that are none, and methods other than GET."""
        self._send(_plain(405, "GET alone") if code == 501 else _plain(code, message or "no request"))

    def _send(self, answer: Answer) -> None:
        status, kind, body = answer
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), "Allow": "GET", **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A browser asks each second."""
