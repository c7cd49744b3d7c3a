"""The HTTP server of page, metrics and health: clients that are many, or slow, take no more of the process than a few
threads and descriptors."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from http.server import ThreadingHTTPServer
from typing import Any

log = logging.getLogger("graphft")

CLIENTS = 16
"""So many are served at a time; one more ends the oldest."""
REQUEST_SECONDS = 5.0
"""For all of a request and its answer."""


class BoundedServer(ThreadingHTTPServer):
    """Serves each request in a thread of its own. Raises OSError if the address is none of this machine, or taken."""

    daemon_threads, request_queue_size = True, 64
    _begun: dict[socket.socket, float]

    def process_request(self, request: Any, client_address: Any) -> None:
        self._begun[request] = time.monotonic()
        for oldest in sorted(self._begun, key=self._begun.__getitem__)[:-CLIENTS]:
            self._end(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._begun.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        late = time.monotonic() - REQUEST_SECONDS
        for request in [request for request, began in list(self._begun.items()) if began < late]:
            self._end(request)

    def server_activate(self) -> None:
        self._begun = {}
        super().server_activate()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("an HTTP request could not be answered", exc_info=True)

    def _end(self, request: socket.socket) -> None:
        """Lets the thread that serves it see the end of its connection."""
        self._begun.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)
