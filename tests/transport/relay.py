"""A TCP relay that a test can make slow: a reader that does not read, or a wire that is cut."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Relay:
    """Forwards connections to `target`; while `paused`, takes nothing more from the clients."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.paused = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Small buffers: little of a frame fits between the client and the paused relay.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connections: list[threading.Thread] = []
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                client, _ = self._listener.accept()
                connections.append(threading.Thread(target=self._forward, args=(client,), daemon=True))
                connections[-1].start()
        for connection in connections:
            connection.join(5)

    def _forward(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(self._target) as server,
            selectors.DefaultSelector() as ready,
        ):
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            while not self._stop.is_set():
                for key, _ in ready.select(0.02):
                    if key.fileobj is client and self.paused.is_set():
                        self._stop.wait(0.01)
                        continue
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
