"""A proxy on loopback that loses what a test tells it to lose."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards loopback connections to `target` (host:port). Traffic can be swallowed in either direction, or cut."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self.drop_requests = False
        self.drop_replies = False
        self.refuse = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
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

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            server = socket.create_connection(self._target)
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
