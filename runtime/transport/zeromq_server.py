"""A shard's ZeroMQ socket: one ROUTER, owned by the shard's loop."""

from __future__ import annotations

import errno
import math
import select
import time
from collections import Counter

import zmq

from graphft.errors import GraphftError, UsageError
from graphft.runtime.protocol.messages import Message
from graphft.runtime.transport.address import WILDCARDS, endpoint
from graphft.runtime.transport.login import Gate, Login
from graphft.runtime.transport.port import Frame, Limits, Received, Released, Sent
from graphft.runtime.transport.zeromq import (
    DONTWAIT_MORE,
    Malformed,
    Waker,
    accept,
    check_frame,
    configure,
    count_sent,
    drain,
    send_message,
)


class ZmqServer:
    """The real `ServerTransport`."""

    def __init__(self, limits: Limits | None = None, login: Login | None = None) -> None:
        """`login`: what peers must show before they can send anything; None: nothing."""
        self.counters: Counter[str] = Counter()
        self._limits = limits or Limits()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, self._limits)
        if login is not None:
            Gate(self._context, login, self.counters)
            login.guard(self._socket)
        self._socket.router_mandatory = True
        # A client that reconnects before its old connection is known to be dead takes its place.
        self._socket.router_handover = True
        self._waker = Waker()
        self._poller = select.poll()
        self._poller.register(self._socket.fileno(), select.POLLIN)
        self._poller.register(self._waker.fd, select.POLLIN)

    def bind(self, host: str = "127.0.0.1", port: int = 0) -> str:
        # Only where asked for: with it, IPv4 addresses come back as IPv6 ones.
        self._socket.ipv6 = ":" in host
        wanted = endpoint("*" if host in WILDCARDS else host, port or "*")
        try:
            self._socket.bind(wanted)
        except zmq.ZMQError as e:
            raise _bind_error(e, wanted) from e
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return bound if host not in WILDCARDS else endpoint("127.0.0.1", bound.rpartition(":")[2])

    def poll(self, timeout_s: float | None) -> list[Received]:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            received = self._drain()
            left = None if end is None else end - time.monotonic()
            if received or (left is not None and left <= 0):
                return received
            ready = self._poller.poll(None if left is None else math.ceil(left * 1000))
            if any(fd == self._waker.fd for fd, _ in ready):
                self._waker.clear()
                return self._drain()

    def _drain(self) -> list[Received]:
        received: list[Received] = []
        for parts in drain(self._socket, self._limits.poll_batch):
            self._take(parts, received)
        return received

    def _take(self, parts: list[memoryview], received: list[Received]) -> None:
        peer = parts[0].tobytes()
        try:
            received.append(Received(peer, *accept(parts[1:], self._limits, self.counters)))
        except Malformed as e:
            self.send(peer, e.refusal())

    def send(self, peer: bytes, message: Message, frame: Frame | None = None, *, copy: bool | None = None) -> Sent:
        view = None if frame is None else check_frame(frame, self._limits)
        try:
            self._socket.send(peer, DONTWAIT_MORE)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.counters["unroutable"] += 1
            return Released()
        count_sent(self.counters, view)
        return send_message(self._socket, message, view, copy)

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._waker.close()


def _bind_error(e: zmq.ZMQError, wanted: str) -> GraphftError:
    if e.errno == errno.EADDRINUSE:
        return UsageError(
            f"cannot listen on {wanted}: the port is in use",
            rule="port-in-use",
            help="choose another port, or 0 for any free one; `ss -ltnp` shows who holds it",
        )
    return UsageError(
        f"cannot listen on {wanted}: {e.strerror}",
        rule="bind",
        help="use an address of this machine (set GRAPHFT_HOST for what others are told)",
    )
