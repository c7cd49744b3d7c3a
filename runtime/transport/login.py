"""ZeroMQ's own authentication of those that talk to a shard, at the handshake of each connection.

A peer shows the run's id and secret (mechanism PLAIN) before it can send a message. The words travel readable: PLAIN
keeps out those who do not know them, not those who can listen on the network in between.
"""

from __future__ import annotations

import hmac
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

ASKED_AT = "inproc://zeromq.zap.01"
"""ZeroMQ asks there, in each context by itself (its RFC 27, ZAP)."""
DOMAIN = "graphft"
LONGEST = 255
"""Bytes of either word that PLAIN carries."""


@dataclass(frozen=True, slots=True)
class Login:
    """The words of a run: its id, and its secret, which no text shows."""

    run: str
    secret: str = field(repr=False)

    def admits(self, run: bytes, secret: bytes) -> bool:
        """Returns True if these are the words. Takes as long for wrong ones as for right ones."""
        right = hmac.compare_digest(run, self.run.encode())
        return hmac.compare_digest(secret, self.secret.encode()) and right

    def guard(self, socket: zmq.Socket) -> None:
        """A server's socket lets in only who shows the words. Before it binds; a `Gate` must be there."""
        socket.zap_domain = DOMAIN.encode()
        socket.plain_server = True

    def show(self, socket: zmq.Socket) -> None:
        """A client's socket shows the words. Before it connects."""
        socket.plain_username, socket.plain_password = self.run.encode(), self.secret.encode()


class Gate:
    """Answers ZeroMQ's questions for the servers of one context: a thread that ends with the context."""

    def __init__(self, context: zmq.Context, login: Login, counters: Counter[str]) -> None:
        self._login, self._counters = login, counters
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(ASKED_AT)
        threading.Thread(target=self._serve, args=(socket,), name="gate", daemon=True).start()

    def _serve(self, socket: zmq.Socket) -> None:
        with socket:
            try:
                while True:
                    socket.send_multipart(self.answer(socket.recv_multipart()))
            except zmq.ContextTerminated:
                return

    def answer(self, question: Sequence[bytes]) -> list[bytes]:
        """[version, id, domain, address, routing id, mechanism, name, password] -> [version, id, status, text, user,
        metadata]: status 200 for those who know the words, 400 for all others."""
        admitted = len(question) == 8 and question[5] == b"PLAIN" and self._login.admits(*question[6:])
        if not admitted:
            self._counters["refused.login"] += 1
        version, number = [*question[:2], b"", b""][:2]
        return [version, number, b"200" if admitted else b"400", b"", b"", b""]
