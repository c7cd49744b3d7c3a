"""Messages on ZeroMQ's sockets: their parts, who may send them, socket options, waking a poll.

A message is [header] or [header, frame]. A peer shows the run's id and secret (mechanism PLAIN) at the handshake of
each connection, before it can send a message. The words travel readable on the network.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import AnyMessage, Message, Refused, decode, encode
from graphft.runtime.transport.port import Frame, Limits, Released, Sent

SLACK = 4096
"""Bytes by which a part may be too large, and still get an answer that says so."""
PARTS = 4
"""Parts of a message that are looked at: a routing id, a header, a frame, and one that should not be there."""
# Combined once, as plain numbers: arithmetic on pyzmq's enumerations takes longer than sending.
DONTWAIT, DONTWAIT_MORE, POLLIN = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.POLLIN)
HANDSHAKES = "inproc://zeromq.zap.01"
"""ZeroMQ asks there, in each context, whether it may let a peer in (its RFC 27, ZAP)."""


class Malformed(Exception):
    """The error of something that arrived and is no message of ours. `reason` is one of parts, header-size, frame-size,
    undecodable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def refusal(self) -> Refused:
        """Tells nothing: who sent this may be anybody."""
        return Refused(code="malformed", reason="", generation=-1, version=-1)


def parse(parts: Sequence[memoryview], limits: Limits) -> tuple[AnyMessage, memoryview | None]:
    """Returns the message and the frame of what arrived, without its routing part. Raises Malformed."""
    if not 1 <= len(parts) <= 2:
        raise Malformed("parts", f"expected a header and at most one frame, got {len(parts)} parts")
    header, frame = parts[0], parts[1] if len(parts) == 2 else None
    if header.nbytes > limits.max_header:
        raise Malformed("header-size", f"header of {header.nbytes} bytes, at most {limits.max_header} are accepted")
    if frame is not None and frame.nbytes > limits.max_frame:
        raise Malformed("frame-size", f"frame of {frame.nbytes} bytes, at most {limits.max_frame} are accepted")
    try:
        return decode(header), frame
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed("undecodable", str(e)) from None


def accept(parts: Sequence[memoryview], limits: Limits, counters: Counter[str]) -> tuple[AnyMessage, memoryview | None]:
    """Does as `parse`, and counts: `received` and `received_bytes`, or `refused.<reason>`."""
    try:
        message, frame = parse(parts, limits)
    except Malformed as e:
        counters[f"refused.{e.reason}"] += 1
        raise
    counters["received"] += 1
    if frame is not None:
        counters["received_bytes"] += frame.nbytes
    return message, frame


def frame_bytes(frame: Frame | None, limits: Limits) -> memoryview | None:
    """Returns the frame to send as bytes. Raises GraphftError when no receiver would take it."""
    view = None if frame is None else memoryview(frame)
    if view is not None and view.nbytes > limits.max_frame:
        raise GraphftError(
            f"frame of {view.nbytes} bytes, at most {limits.max_frame} can be sent",
            rule="frame-size",
            help="split it into smaller buckets, or raise Limits.max_frame on both sides",
        )
    return view


@dataclass(frozen=True, slots=True)
class Login:
    """The words of a run: its id, and its secret, which no text shows."""

    run: str
    secret: str = field(repr=False)

    def admits(self, run: bytes, secret: bytes) -> bool:
        """True if these are the words. Takes as long for wrong ones as for right ones."""
        right = hmac.compare_digest(run, self.run.encode())
        return hmac.compare_digest(secret, self.secret.encode()) and right

    def guard(self, socket: zmq.Socket) -> None:
        """Has a server's socket let in only who shows the words. Before it binds; a `Gate` must be there."""
        socket.zap_domain, socket.plain_server = b"graphft", True

    def show(self, socket: zmq.Socket) -> None:
        """Has a client's socket show the words. Before it connects."""
        socket.plain_username, socket.plain_password = self.run.encode(), self.secret.encode()


class Gate:
    """Answers ZeroMQ's questions for the servers of one context: a thread that ends with the context."""

    def __init__(self, context: zmq.Context, login: Login, counters: Counter[str]) -> None:
        self._login, self._counters = login, counters
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(HANDSHAKES)
        threading.Thread(target=self._serve, args=(socket,), name="gate", daemon=True).start()

    def _serve(self, socket: zmq.Socket) -> None:
        with socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                socket.send_multipart(self.answer(socket.recv_multipart()))

    def answer(self, question: Sequence[bytes]) -> list[bytes]:
        """[version, id, domain, address, routing id, mechanism, name, password] -> [version, id, status, text, user,
        metadata]: status 200 for those who know the words, 400 for all others."""
        admitted = len(question) == 8 and question[5] == b"PLAIN" and self._login.admits(*question[6:])
        if not admitted:
            self._counters["refused.login"] += 1
        return [*question[:2], b"200" if admitted else b"400", b"", b"", b""]


class Waker:
    """Interrupts a poll from another thread: an eventfd that becomes readable by `wake`. Calls after `close` do nothing
    (the number may be reused)."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open = True

    def wake(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Takes back the wakes so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)


class Tracked:
    """The `Sent` of a frame that ZeroMQ reads in place."""

    __slots__ = ("_tracker",)

    def __init__(self, tracker: zmq.MessageTracker) -> None:
        self._tracker = tracker

    @property
    def done(self) -> bool:
        return self._tracker.done

    def wait(self, timeout_s: float | None = None) -> bool:
        try:
            self._tracker.wait(-1 if timeout_s is None else timeout_s)
        except zmq.NotDone:
            return False
        return True


def configure(socket: zmq.Socket, limits: Limits) -> None:
    """Sets the options of a data socket; before it binds or connects."""
    socket.linger = 0
    # No high-water mark for what a trainer sends: the protocol's own windows (one contribution per step and slot) bound
    # it, and messages wait there for a shard that is away. What a peer can make others queue has one.
    socket.sndhwm = limits.max_queued if socket.type == zmq.ROUTER else 0
    socket.rcvhwm = limits.max_queued
    socket.copy_threshold = limits.zero_copy_from
    # Beyond this the connection is dropped before memory is taken; below, the receiver refuses with an answer. It
    # bounds each part. ZeroMQ has no bound for how many parts a message has: all are in memory before one is seen.
    socket.maxmsgsize = max(limits.max_frame, limits.max_header) + SLACK
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 30
    socket.tcp_keepalive_intvl = 10
    socket.tcp_keepalive_cnt = 3
    # Pings are sent and answered by ZeroMQ's own thread: a busy peer answers, a stopped or unreachable one does not.
    socket.heartbeat_ivl = int(limits.heartbeat * 1000)
    socket.heartbeat_timeout = int(limits.heartbeat_timeout * 1000)
    # A ping cannot overtake a half-written frame; this notices a peer that stopped reading in the middle of one.
    socket.tcp_maxrt = int(limits.heartbeat_timeout * 1000)


def count_sent(counters: Counter[str], frame: memoryview | None) -> None:
    counters["sent"] += 1
    if frame is not None:
        counters["sent_bytes"] += frame.nbytes


def send_message(
    socket: zmq.Socket, message: Message, frame: memoryview | None, limits: Limits, counters: Counter[str]
) -> Sent:
    """Queues header and frame on the socket (after the routing part, if any), and counts them."""
    count_sent(counters, frame)
    if frame is None:
        socket.send(encode(message), DONTWAIT)
        return Released()
    socket.send(encode(message), DONTWAIT_MORE)
    if frame.nbytes < limits.zero_copy_from:
        socket.send(frame, DONTWAIT)
        return Released()
    # An explicit zmq.Frame: Socket.send(copy=False) would still copy below its threshold.
    return Tracked(socket.send(zmq.Frame(frame, track=True, copy=False), DONTWAIT, copy=False, track=True))


def readable(socket: zmq.Socket) -> bool:
    """True if a message is there. Only after a look like this may one wait for the socket's descriptor."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)


def drain(socket: zmq.Socket, limit: int) -> Iterator[list[memoryview]]:
    """Yields the messages that are there, at most `limit`: their parts, in ZeroMQ's memory."""
    for _ in range(limit):
        if not readable(socket):
            return
        # As zmq.Frame, also what is small: it knows whether more follows; asking the socket takes longer than copying.
        part = socket.recv(DONTWAIT, copy=False)
        parts = [part.buffer]
        while part.more:
            part = socket.recv(DONTWAIT, copy=False)
            if len(parts) < PARTS:
                parts.append(part.buffer)
        yield parts
