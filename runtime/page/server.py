"""Serves pages of jobs over HTTP on this machine's loopback, to GET alone.

    /                      the page of the job; of several jobs, a list of links to /job/NAME/
    /status.json           what the page shows
    /metrics               the same for Prometheus; of several jobs, each by its link
    /healthz               200

Everything comes from here, and the Content-Security-Policy allows nothing else. A request must name this machine as its
host: else a web page elsewhere could have its own name point here and read what only this machine is to see.
"""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from graphft.disk.sealed_json import encode_json
from graphft.errors import UsageError, describe
from graphft.runtime.page.job_page import JobPage
from graphft.runtime.process.threads import side_by_side

log = logging.getLogger("graphft")

LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d*)?|::1")
"""What a request may call this machine. The port may be another one: ssh -L forwards one to this."""
REQUEST_SECONDS = 5.0
"""For which a client may be silent while it asks."""
HEADERS_SECONDS = 10.0
"""For all of a request to arrive: else clients that send a byte now and then hold all places."""
CLIENTS = 32
"""Requests that are answered at a time; more are closed at once."""
POLL_SECONDS = 0.1
"""For which its end may take."""
WATCHED_SECONDS = 3.0
"""Somebody looks at the page if it was asked for so shortly before ..."""
LAST_LOOK_SECONDS = 2.5
"""... and has so long to ask for the end, ..."""
LAST_ANSWER_SECONDS = 10.0
"""... which is computed anew."""
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
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


class Site(Protocol):
    """The jobs that are shown. Any thread may ask."""

    def only(self) -> JobPage | None:
        """The one job, of a page that is of one."""

    def briefs(self) -> list[dict[str, Any]]:
        """Of several: what is told of each in a list, with its `link`."""

    def job(self, link: str) -> JobPage | None:
        """None if there is no such job."""


class OneJob:
    """A site of one job."""

    def __init__(self, page: JobPage) -> None:
        self._page = page

    def only(self) -> JobPage | None:
        return self._page

    def briefs(self) -> list[dict[str, Any]]:
        return []

    def job(self, link: str) -> JobPage | None:
        return None


def answer(site: Site, path: str) -> Answer:
    """To a request for this path, without its query."""
    name, link = urllib.parse.unquote(path).removeprefix("/"), ""
    if name.startswith("job/"):
        link, slash, name = name.removeprefix("job/").partition("/")
        if not slash:
            return _plain(404, f"there is no {path}, but {path}/")
    if name in ("", *_FILES):
        file = name or "page.html"
        return 200, _FILES[file], Path(__file__).with_name(file).read_bytes()
    if name == "healthz" and not link:
        return _plain(200, "ok")
    page = site.job(link) if link else site.only()
    if name == "status.json":
        if page is not None:
            return 200, "application/json", page.json()
        if not link:
            return 200, "application/json", encode_json({"jobs": site.briefs(), "now": time.time()})
    if name == "metrics" and not link:
        from graphft.runtime.page.prometheus import CONTENT_TYPE, metrics_of  # whose library few ask for

        if page is not None:
            return 200, CONTENT_TYPE, metrics_of([page.document()])
        links = [brief["link"] for brief in site.briefs()]  # copies have the same name
        found = side_by_side(lambda link: _document(site, link), links)
        return 200, CONTENT_TYPE, metrics_of([each for each in found if each is not None])
    return _plain(404, f"there is no {path}, but /, /status.json, /metrics and /healthz")


def _document(site: Site, link: str) -> dict[str, Any] | None:
    page = site.job(link)
    return page.document() | {"job": link} if page is not None else None


def _plain(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


class _Server(ThreadingHTTPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 2 * CLIENTS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(CLIENTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for the page could not be answered", exc_info=True)


class _Request(io.RawIOBase):
    """What a client asks, until it has taken too long for that: then reads raise TimeoutError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._end = connection, time.monotonic() + HEADERS_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"its request has not arrived in {HEADERS_SECONDS:.0f} s")
        self._connection.settimeout(min(REQUEST_SECONDS, left))
        return self._connection.recv_into(buffer)


class PageServer:
    """Answers from a thread of its own. Raises UsageError if there is no such port here, or it is taken."""

    def __init__(self, site: Site, port: int = 0) -> None:
        self.asked_at = float("-inf")
        """When somebody asked for `status.json` last (monotonic)."""
        self.told_of = float("-inf")
        """When somebody asked for it who has got the answer."""
        self.asked = threading.Condition()
        try:
            self._server = _Server((LOOPBACK, port), _handler(site, self._note, self._told))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"the page cannot be served at {LOOPBACK}:{port}: {error}",
                rule="page",
                help="give another port, or none: a free one is taken then",
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._serve, name="page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/"

    def _serve(self) -> None:
        try:
            self._server.serve_forever(POLL_SECONDS)
        except Exception:
            log.warning("the page is not served any more; the job goes on", exc_info=True)

    def _note(self, path: str) -> None:
        if path.endswith("status.json"):
            with self.asked:
                self.asked_at = time.monotonic()
                self.asked.notify_all()

    def _told(self, path: str, asked_at: float) -> None:
        if path.endswith("status.json"):
            with self.asked:
                self.told_of = max(self.told_of, asked_at)
                self.asked.notify_all()

    def show_end(self) -> None:
        """Whoever looks at the page now sees how the job ended: waits, a moment, until it was asked for once more, and
        answered."""
        now = time.monotonic()
        if now - self.asked_at < WATCHED_SECONDS:
            with self.asked:
                if self.asked.wait_for(lambda: self.asked_at > now, LAST_LOOK_SECONDS):
                    self.asked.wait_for(lambda: self.told_of > now, LAST_ANSWER_SECONDS)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(
    site: Site, note: Callable[[str], None], told: Callable[[str, float], None]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version, sys_version = "graphft", ""

        def setup(self) -> None:
            super().setup()
            self.rfile = io.BufferedReader(_Request(self.connection))

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if not _names_this_machine(self.headers.get_all("Host") or []):
                self._send(_plain(421, "this is served to its own machine alone: ask for 127.0.0.1 or localhost"))
                return
            asked_at = time.monotonic()
            note(path)
            try:
                self._send(answer(site, path))
            except OSError:  # who asked has gone
                raise
            except Exception as error:
                log.warning("%s of the page cannot be answered", path, exc_info=True)
                self._send(_plain(500, f"{path} cannot be answered: {describe(error)}"))
            finally:
                told(path, asked_at)

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """Of requests that are none, and of methods other than GET."""
            refused = code == 501
            self._send(_plain(405 if refused else code, "GET alone" if refused else message or "no request"))

        def _send(self, answer: Answer) -> None:
            status, kind, body = answer
            self.connection.settimeout(REQUEST_SECONDS)
            self.send_response(status)
            headers = {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}
            if status == 405:
                headers["Allow"] = "GET"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """A browser asks each second."""

    return Handler


def _names_this_machine(hosts: list[str]) -> bool:
    if len(hosts) != 1:
        return False
    return _HOST.fullmatch(hosts[0].strip().lower()) is not None
