"""The ZeroMQ drivers: a trainer's sockets, one DEALER per shard, behind a lock; and a shard's, one ROUTER.

ZeroMQ's own thread writes and reads the network without the interpreter's lock while torch computes.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import threading
import time
from collections import Counter, deque

import zmq

from graphft.errors import GraphftError, UsageError
from graphft.runtime.protocol.messages import Message
from graphft.runtime.transport.address import WILDCARDS, endpoint, split_endpoint
from graphft.runtime.transport.port import Frame, Limits, Received, Released, Reply, Sent
from graphft.runtime.transport.wire import (
    DONTWAIT_MORE,
    Gate,
    Login,
    Malformed,
    Waker,
    accept,
    configure,
    drain,
    frame_bytes,
    readable,
    send_message,
)


class ZmqClient:
    """The real `ClientTransport`. `identity` names this process in the shards' view of their peers; `login` is what it
    shows them (None: nothing)."""

    def __init__(self, identity: str, limits: Limits | None = None, login: Login | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self._identity, self._login = identity, login
        self._limits = limits or Limits()
        self._context = zmq.Context(io_threads=1)
        self._lock = threading.Lock()
        """Guards everything below; held for microseconds, never while waiting."""
        self._links: dict[int, zmq.Socket] = {}
        self._inbox: deque[Reply] = deque()
        self._wakes = 0
        self._waiting = False
        self._closed = False
        self._waker = Waker()
        self._poll = self._make_poll()
        self._receiving = threading.Lock()
        """Held by the one thread that receives."""

    def connect(self, shard: int, address: str) -> None:
        split_endpoint(address)
        with self._lock:
            self._check_open()
            self._unlink(shard)
            socket = self._context.socket(zmq.DEALER)
            configure(socket, self._limits)
            if self._login is not None:
                self._login.show(socket)
            socket.ipv6 = True
            socket.reconnect_ivl = 50
            socket.reconnect_ivl_max = 1000
            # One connection, one routing id: an answer to an earlier connection can never reach this one.
            socket.routing_id = f"{self._identity}#{os.urandom(6).hex()}".encode()[-255:]
            try:
                socket.connect(address)
            except zmq.ZMQError as e:
                socket.close()
                raise UsageError(
                    f"'{address}' is no address of a shard: {e.strerror}",
                    rule="address",
                    help="see what the pserver registered in etcd; GRAPHFT_HOST sets its host",
                ) from e
            self._links[shard] = socket
            self._relinked()

    def disconnect(self, shard: int) -> None:
        with self._lock:
            self._unlink(shard)
            self._relinked()

    def _unlink(self, shard: int) -> None:
        socket = self._links.pop(shard, None)
        if socket is not None:
            socket.close(linger=0)
            fresh = [r for r in self._inbox if r.shard != shard]
            self.counters["stale"] += len(self._inbox) - len(fresh)
            self._inbox = deque(fresh)

    def _relinked(self) -> None:
        self._poll = self._make_poll()
        if self._waiting:
            self._waker.wake()

    def _make_poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._waker.fd, select.POLLIN)
        for socket in self._links.values():
            poll.register(socket.fileno(), select.POLLIN)
        return poll

    def send(self, shard: int, message: Message, frame: Frame | None = None) -> Sent:
        view = frame_bytes(frame, self._limits)
        with self._lock:
            self._check_open()
            socket = self._links.get(shard)
            if socket is None:
                self.counters["unroutable"] += 1
                return Released()
            sent = send_message(socket, message, view, self._limits, self.counters)
            # Sending takes in ZeroMQ's notices; the thread that waits for them would not see them any more.
            if self._waiting and readable(socket):
                self._waker.wake()
            return sent

    def receive(self, timeout_s: float | None) -> Reply | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._receiving:
            while True:
                with self._lock:
                    self._check_open()
                    self._waiting = False
                    reply = self._take()
                    if reply is not None:
                        return reply
                    left = None if end is None else end - time.monotonic()
                    if self._wakes or (left is not None and left <= 0):
                        self._wakes = max(0, self._wakes - 1)
                        return None
                    self._waiting = True
                    poll = self._poll
                ready = poll.poll(None if left is None else math.ceil(left * 1000))
                if any(fd == self._waker.fd for fd, _ in ready):
                    self._waker.clear()

    def _take(self) -> Reply | None:
        if not self._inbox:
            for shard, socket in self._links.items():
                for parts in drain(socket, self._limits.poll_batch):
                    with contextlib.suppress(Malformed):  # counted; a client answers nothing
                        self._inbox.append(Reply(shard, *accept(parts, self._limits, self.counters)))
        return self._inbox.popleft() if self._inbox else None

    def wake(self) -> None:
        with self._lock:
            self._wakes += 1
        self._waker.wake()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for socket in self._links.values():
                socket.close(linger=0)
            self._links.clear()
        self._waker.wake()
        with self._receiving:  # no thread waits any more
            self._waker.close()
        self._context.term()

    def _check_open(self) -> None:
        if self._closed:
            raise GraphftError(
                f"the transport of {self._identity} is closed",
                rule="transport",
                help="send, receive and connect before close()",
            )


class ZmqServer:
    """The real `ServerTransport`. `login`: what peers must show before they can send anything; None: nothing."""

    def __init__(self, limits: Limits | None = None, login: Login | None = None) -> None:
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
            used = e.errno == errno.EADDRINUSE
            raise UsageError(
                f"cannot listen on {wanted}: {'the port is in use' if used else e.strerror}",
                rule="port-in-use" if used else "bind",
                help="choose another port, or 0 for any free one; `ss -ltnp` shows who holds it"
                if used
                else "use an address of this machine (set GRAPHFT_HOST for what others are told)",
            ) from e
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
            peer = parts[0].tobytes()
            try:
                received.append(Received(peer, *accept(parts[1:], self._limits, self.counters)))
            except Malformed as e:
                self.send(peer, e.refusal())
        return received

    def send(self, peer: bytes, message: Message, frame: Frame | None = None) -> Sent:
        view = frame_bytes(frame, self._limits)
        try:
            self._socket.send(peer, DONTWAIT_MORE)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.counters["unroutable"] += 1
            return Released()
        return send_message(self._socket, message, view, self._limits, self.counters)

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._waker.close()
