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
from dataclasses import dataclass, field

import zmq

from graphft.errors import GraphftError, UsageError
from graphft.runtime.protocol.messages import Message, Refused, refusal_of_stranger
from graphft.runtime.transport.address import (
    WILDCARDS,
    endpoint,
    is_loopback,
    network_digest,
    split_endpoint,
    split_key,
    with_key,
)
from graphft.runtime.transport.channel import Channel, Login
from graphft.runtime.transport.port import Frame, Limits, Received, Released, Reply, Sent
from graphft.runtime.transport.wire import (
    DONTWAIT_MORE,
    Gate,
    Malformed,
    Waker,
    accept,
    configure,
    drain,
    frame_bytes,
    readable,
    send_message,
)

RELINK_SECONDS, LOOK_SECONDS = 0.05, 0.005
"""A connection that has broken is made anew after this time at the earliest."""
BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""Events of a socket that has no connection any more, or never got one."""
GONE = Refused("unknown-peer", "the connection broke", -1, -1)
"""Told to a client as if by its shard, which does not know it any more indeed."""


@dataclass
class Link:
    """Keeps a connection to a shard, which ZeroMQ does not make again by itself: anybody may listen there later.
    `doubtful`: the shard has not proven yet, by an answer, that it has the key of its record. `told`: the client knows
    that the connection broke."""

    address: str
    socket: zmq.Socket
    channel: Channel | None
    doubtful: bool = field(init=False)
    told: bool = False
    opened: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.doubtful = self.channel is not None
        self.monitor = self.socket.get_monitor_socket(BROKEN) if self.doubtful else None
        self._looked = 0.0

    @property
    def broken(self) -> bool:
        """Looks every few milliseconds: what is sent meanwhile is lost with the connection."""
        if self.monitor is None or time.monotonic() < self._looked + LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return readable(self.monitor)

    def close(self) -> None:
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
        self.socket.close(linger=0)


class ZmqClient:
    """The real `ClientTransport`. `identity` names this process in the shards' view of their peers. With a `login` it
    takes only answers of shards with the keys of their addresses; None: of any."""

    def __init__(self, identity: str, limits: Limits | None = None, login: Login | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self._identity, self._login = identity, login
        self._limits = limits or Limits()
        self._context = zmq.Context(io_threads=1)
        self._lock = threading.Lock()
        """Guards everything below; held for microseconds, never while waiting."""
        self._links: dict[int, Link] = {}
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
            self._links[shard] = self._open(address)
            self._relinked()

    def _open(self, address: str) -> Link:
        public, address_of_socket = split_key(address)
        socket = self._context.socket(zmq.DEALER)
        configure(socket, self._limits)
        socket.ipv6 = True
        # One connection, one routing id: an answer to an earlier connection can never reach this one.
        socket.routing_id = f"{self._identity}#{os.urandom(6).hex()}".encode("ascii", "replace")[-170:]
        channel, link = None, None
        try:
            if self._login is None:
                socket.reconnect_ivl, socket.reconnect_ivl_max = int(1000 * RELINK_SECONDS), 1000
            else:
                socket.reconnect_ivl, socket.connect_timeout = -1, int(1000 * self._limits.heartbeat_timeout)
                socket.routing_id = connection = self._login.keys.connection(self._identity, address_of_socket)
                channel = self._login.keys.channel(public, connection, server=False)
                channel.near = not connection.endswith(b"@")
                socket.plain_username = f"{self._login.keys.public}:".encode() + connection
                socket.plain_password = channel.proof.encode()
            link = Link(address, socket, channel)
            socket.connect(address_of_socket)
        except (zmq.ZMQError, ValueError) as e:
            (link or socket).close()
            raise UsageError(
                f"'{address}' is no address of a shard: {e}",
                rule="address",
                help="see what the pserver registered in etcd; GRAPHFT_HOST sets its host",
            ) from e
        return link

    def disconnect(self, shard: int) -> None:
        with self._lock:
            self._unlink(shard)
            self._relinked()

    def _unlink(self, shard: int) -> None:
        link = self._links.pop(shard, None)
        if link is not None:
            link.close()
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
        for link in self._links.values():
            poll.register(link.socket.fileno(), select.POLLIN)
            if link.monitor is not None and not link.told:
                poll.register(link.monitor.fileno(), select.POLLIN)
        return poll

    def send(self, shard: int, message: Message, frame: Frame | None = None) -> Sent:
        view = frame_bytes(frame, self._limits)
        with self._lock:
            self._check_open()
            link = self._links.get(shard)
            if link is not None and link.broken:
                link = self._relink(shard, link)
            large = view is not None and view.nbytes >= self._limits.zero_copy_from
            if link is None or (large and link.doubtful):
                self.counters["unroutable"] += 1
                return Released()
            try:
                sent = send_message(link.socket, message, view, self._limits, self.counters, link.channel)
            except zmq.Again:  # it breaks just now
                return Released()
            # Sending takes in ZeroMQ's notices; the thread that waits for them would not see them any more.
            if self._waiting and readable(link.socket):
                self._waker.wake()
            return sent

    def _relink(self, shard: int, link: Link) -> Link | None:
        """Returns a new connection in the place of one that has broken; None if it is too early."""
        if time.monotonic() < link.opened + RELINK_SECONDS:
            return None
        link.close()
        self._links[shard] = link = self._open(link.address)
        self._relinked()
        return link

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
            for shard, link in self._links.items():
                if not link.told and link.broken:
                    link.told = True
                    self._poll = self._make_poll()
                    self._inbox.append(Reply(shard, GONE))
                for parts in drain(link.socket, self._limits.poll_batch):
                    with contextlib.suppress(Malformed):  # counted; a client answers nothing
                        found = accept([p.buffer for p in parts], self._limits, self.counters, link.channel)
                        self._inbox.append(Reply(shard, *found))
                        link.doubtful = False
        return self._inbox.popleft() if self._inbox else None

    def wake(self) -> None:
        with self._lock:
            self._wakes += 1
        self._waker.wake()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for link in self._links.values():
                link.close()
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
    """The real `ServerTransport`. `login`: its keys, and those of the peers that it hears; None: it hears anybody."""

    def __init__(self, limits: Limits | None = None, login: Login | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self._limits = limits or Limits()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, self._limits)
        self._login = login
        self._channels: dict[bytes, Channel] = {}
        self._newest: dict[str, tuple[int, bytes]] = {}
        """By routing id, this end of a connection; by public key, number and routing id of its newest connection. A
        channel is made once: another one with its keys would take again what somebody has recorded."""
        if login is not None:
            Gate(self._context, login, self.counters)
            self._socket.zap_domain, self._socket.plain_server = b"graphft", True
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
        address = bound if host not in WILDCARDS else endpoint("127.0.0.1", bound.rpartition(":")[2])
        return address if self._login is None else with_key(address, self._login.keys.public)

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
            peer = parts[0].bytes
            channel = self._channel(peer, parts[-1])
            if channel is None and self._login is not None:
                self.counters["refused.login"] += 1
                continue
            try:
                found = accept([p.buffer for p in parts[1:]], self._limits, self.counters, channel)
                received.append(Received(peer, *found))
            except Malformed as e:
                if e.reason != "forged":
                    self.send(peer, refusal_of_stranger("malformed"))
        return received

    def _channel(self, peer: bytes, part: zmq.Frame) -> Channel | None:
        """Returns this end of a peer's connection. A new one is that of the key that was let in at the handshake."""
        if self._login is None or peer in self._channels:
            return self._channels.get(peer)
        name = str(part.get("User-Id"))
        found = self._login.accept(name)
        if found is None or name != f"{found[0]}:{peer.decode('ascii', 'replace')}":
            return None
        public, number, channel = found
        before, replaced = self._newest.get(public, (0, b""))
        if number <= before:
            return None
        self._channels.pop(replaced, None)
        self._newest[public], self._channels[peer] = (number, peer), channel
        near = is_loopback(str(part.get("Peer-Address")).removeprefix("::ffff:"))
        channel.local = near and peer.endswith(f"@{network_digest()}".encode())
        return channel

    def send(self, peer: bytes, message: Message, frame: Frame | None = None) -> Sent:
        view = frame_bytes(frame, self._limits)
        channel = self._channels.get(peer)
        if channel is None and self._login is not None:
            self.counters["unroutable"] += 1
            return Released()
        try:
            self._socket.send(peer, DONTWAIT_MORE)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.counters["unroutable"] += 1
            return Released()
        return send_message(self._socket, message, view, self._limits, self.counters, channel)

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._waker.close()
