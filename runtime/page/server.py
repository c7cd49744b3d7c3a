"""Serves pages of jobs over HTTP on this machine's loopback, to GET alone.

    /                      the page of the job; of several jobs, a list of links to /job/NAME/
    /status.json           what the page shows
    /metrics               the same for Prometheus; of several jobs, each by its link
    /healthz               200

Everything comes from here, and the Content-Security-Policy allows nothing else. A request must name this machine as its
host: else a web page elsewhere could have its own name point here and read what only this machine is to see.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import urllib.parse
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


class Site(Protocol):
    """The jobs that are shown. Any thread may ask."""

    def only(self) -> JobPage | None:
        """Returns the one job, of a page that is of one."""

    def briefs(self) -> list[dict[str, Any]]:
        """Returns what a list of several jobs shows of each, with its `link`."""

    def job(self, link: str) -> JobPage | None:
        """Returns None if there is no such job."""


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
    """Answers a request for this path, without its query."""
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


class PageServer:
    """Answers from a thread of its own. Raises UsageError if there is no such port here, or it is taken."""

    def __init__(self, site: Site, port: int = 0) -> None:
        self.site, self.answered_at = site, float("-inf")
        """`answered_at`: when `status.json` was last asked for by somebody who has got the answer (monotonic)."""
        self.answered = threading.Condition()
        handler = type("Handler", (_Handler,), {"page": self})
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
        with self.answered:
            if now - self.answered_at < WATCHED_SECONDS:
                self.answered.wait_for(lambda: self.answered_at > now, LAST_LOOK_SECONDS)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for the page could not be answered", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    page: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "graphft", ""

    def do_GET(self) -> None:
        path, asked_at = self.path.partition("?")[0], time.monotonic()
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or _HOST.fullmatch(hosts[0].strip().lower()) is None:
            self._send(_plain(421, "this is served to its own machine alone: ask for 127.0.0.1 or localhost"))
            return
        try:
            found = answer(self.page.site, path)
        except Exception as error:
            log.warning("%s of the page cannot be answered", path, exc_info=True)
            found = _plain(500, f"{path} cannot be answered: {describe(error)}")
        self._send(found)
        if path.endswith("status.json"):
            with self.page.answered:
                self.page.answered_at = max(asked_at, self.page.answered_at)
                self.page.answered.notify_all()

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
