"""Messages on ZeroMQ's sockets: their parts, who may send them, socket options, waking a poll.

A message is [header] or [header, frame]; on a channel, what `Channel.seal` makes of them. A client proves who it is at
the handshake of each connection (mechanism PLAIN, with a proof for a password), before it can send a message; a server
proves it by its first answer, before it is sent a large frame.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import AnyMessage, Message, decode, encode
from graphft.runtime.transport.channel import OVERHEAD, Channel, Forged, Login
from graphft.runtime.transport.port import Frame, Limits, Released, Sent

SLACK = 4096 + OVERHEAD
"""Bytes by which a part may be too large, and still get an answer that says so."""
PARTS = 4
"""Parts of a message that are looked at: a routing id, a header, a frame, and one that should not be there."""
# Combined once, as plain numbers: arithmetic on pyzmq's enumerations takes longer than sending.
DONTWAIT, DONTWAIT_MORE, POLLIN = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.POLLIN)
PATIENCE_SECONDS, LOOK_SECONDS, MOST_WAITING = 0.5, 0.005, 32
"""A client whose key is not known yet is let wait so long: it registers, then connects, and the view is later. So many
at a time: what strangers make a server keep has a bound."""
HANDSHAKES = "inproc://zeromq.zap.01"
"""ZeroMQ asks there, in each context, whether it may let a peer in (its RFC 27, ZAP)."""


class Malformed(Exception):
    """The error of something that arrived and is no message of ours. `reason` is one of forged, parts, header-size,
    frame-size, undecodable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parse(
    parts: Sequence[memoryview], limits: Limits, channel: Channel | None = None
) -> tuple[AnyMessage, memoryview | None]:
    """Returns the message and the frame of what arrived, without its routing part. Raises Malformed."""
    if not 1 <= len(parts) <= 2:
        raise Malformed("parts", f"expected a header and at most one frame, got {len(parts)} parts")
    header, frame = parts[0], parts[1] if len(parts) == 2 else None
    if channel is not None:
        try:
            header, frame = channel.open(header, frame)
        except Forged as error:
            raise Malformed("forged", str(error)) from None
    if header.nbytes > limits.max_header:
        raise Malformed("header-size", f"header of {header.nbytes} bytes, at most {limits.max_header} are accepted")
    if frame is not None and frame.nbytes > limits.max_frame:
        raise Malformed("frame-size", f"frame of {frame.nbytes} bytes, at most {limits.max_frame} are accepted")
    try:
        return decode(header), frame
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed("undecodable", str(e)) from None


def accept(
    parts: Sequence[memoryview], limits: Limits, counters: Counter[str], channel: Channel | None = None
) -> tuple[AnyMessage, memoryview | None]:
    """Does as `parse`, and counts: `received` and `received_bytes`, or `refused.<reason>`."""
    try:
        message, frame = parse(parts, limits, channel)
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


class Gate:
    """Answers ZeroMQ's questions for the server of one context: a thread that ends with the context."""

    def __init__(self, context: zmq.Context, login: Login, counters: Counter[str]) -> None:
        self._login, self._counters = login, counters
        self._newest: dict[str, int] = {}
        """By public key, the number of its newest connection: each is let in once, as its proof may be recorded."""
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(HANDSHAKES)
        threading.Thread(target=self._serve, args=(socket,), name="gate", daemon=True).start()

    def _serve(self, socket: zmq.Socket) -> None:
        waiting: list[tuple[float, list[bytes]]] = []
        with socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                if socket.poll(int(1000 * LOOK_SECONDS) if waiting else None):
                    patience = PATIENCE_SECONDS if len(waiting) < MOST_WAITING else 0.0
                    waiting.append((time.monotonic() + patience, socket.recv_multipart()))
                waiting = [one for one in waiting if not self._answered(socket, *one)]

    def _answered(self, socket: zmq.Socket, end: float, question: list[bytes]) -> bool:
        """Answers [peer, "", version, id, domain, address, routing id, mechanism, name, password] with [peer, "",
        version, id, status, text, name, metadata]: status 200 if the peer has the key that it names, else 400."""
        shown, proof = question[8:] if len(question) == 10 and question[7] == b"PLAIN" else (b"", b"")
        name = shown.decode("utf-8", "replace")
        found = self._login.accept(name)
        if found is None and name and time.monotonic() < end:
            return False
        known = found is not None and hmac.compare_digest(proof, found[2].proof.encode())
        if found is not None and known and found[1] > self._newest.get(found[0], 0):
            self._newest[found[0]] = found[1]
            status, user = b"200", shown
        else:
            self._counters["refused.login"] += 1
            status, user = b"400", b""
        socket.send_multipart([*question[:4], status, b"", user, b""])
        return True


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
    socket.maxmsgsize = max(limits.max_frame, limits.max_header + limits.zero_copy_from) + SLACK
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
    socket: zmq.Socket,
    message: Message,
    frame: memoryview | None,
    limits: Limits,
    counters: Counter[str],
    channel: Channel | None,
) -> Sent:
    """Queues header and frame on the socket (after the routing part, if any), and counts them."""
    count_sent(counters, frame)
    header = encode(message)
    if channel is not None and not channel.bare:
        inner = None if frame is None or frame.nbytes >= limits.zero_copy_from else frame
        frame = frame if inner is None else None
        header = channel.seal(header, inner, frame)
    if frame is None:
        socket.send(header, DONTWAIT)
        return Released()
    socket.send(header, DONTWAIT_MORE)
    if frame.nbytes < limits.zero_copy_from:
        socket.send(frame, DONTWAIT)
        return Released()
    # An explicit zmq.Frame: Socket.send(copy=False) would still copy below its threshold.
    return Tracked(socket.send(zmq.Frame(frame, track=True, copy=False), DONTWAIT, copy=False, track=True))


def readable(socket: zmq.Socket) -> bool:
    """True if a message is there. Only after a look like this may one wait for the socket's descriptor."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)


def drain(socket: zmq.Socket, limit: int) -> Iterator[list[zmq.Frame]]:
    """Yields the messages that are there, at most `limit`: their parts, in ZeroMQ's memory."""
    for _ in range(limit):
        if not readable(socket):
            return
        # As zmq.Frame, also what is small: it knows whether more follows; asking the socket takes longer than copying.
        part = socket.recv(DONTWAIT, copy=False)
        parts = [part]
        while part.more:
            part = socket.recv(DONTWAIT, copy=False)
            if len(parts) < PARTS:
                parts.append(part)
        yield parts
