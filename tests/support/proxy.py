"""A proxy on loopback that loses what a test tells it to lose."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Sequence

Address = tuple[str, int]


class Proxy:
    """Forwards connections to `target` (host:port), or to the next of the addresses that it gives then. Traffic can be
    swallowed in either direction, or cut."""

    def __init__(self, target: str | Callable[[], Sequence[Address]], here: Address = ("127.0.0.1", 0)) -> None:
        self._target = target
        self.drop_requests = False
        self.drop_replies = False
        self.refuse = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(here)
        self.endpoint = f"{here[0]}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Closes all connections. New ones are taken, unless `refuse`."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def heal(self) -> None:
        """Loses nothing any more. What was swallowed is gone, so its connections are cut."""
        self.cut()  # first, or what is read already, and not yet swallowed, would get through
        self.drop_requests = self.drop_replies = self.refuse = False
        self.cut()

    def _targets(self) -> Sequence[Address]:
        if callable(self._target):
            return self._target()
        host, _, port = self._target.rpartition(":")
        return [(host, int(port))]

    def _accept(self) -> None:
        for turn in itertools.count():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            targets = [] if self.refuse else self._targets()
            try:
                server = socket.create_connection(targets[turn % max(len(targets), 1)])
            except (IndexError, OSError):  # nobody is there
                client.close()
                continue
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, "drop_requests"), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, "drop_replies"), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, drop: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not getattr(self, drop):
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
