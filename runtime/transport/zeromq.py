"""What both ZeroMQ drivers share: socket options, sending one message, receiving one message."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from graphft.runtime.protocol.messages import Message, encode
from graphft.runtime.transport.port import Limits, Released, Sent

SLACK = 4096
"""Bytes by which a part may be too large, and still get an answer that says so."""
PARTS = 4
"""Parts of a message that are looked at: a routing id, a header, a frame, and one that should not be there."""
# Combined once, as plain numbers: arithmetic on pyzmq's enumerations takes longer than sending.
DONTWAIT, DONTWAIT_MORE, POLLIN = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.POLLIN)


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
    """Options of every data socket; before it binds or connects."""
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


def send_message(socket: zmq.Socket, message: Message, frame: memoryview | None, copy: bool | None) -> Sent:
    """Queues header and frame on the socket (after the routing part, if any)."""
    if frame is None:
        socket.send(encode(message), DONTWAIT)
        return Released()
    socket.send(encode(message), DONTWAIT_MORE)
    if copy or (copy is None and frame.nbytes < socket.copy_threshold):
        socket.send(frame, DONTWAIT)
        return Released()
    # An explicit zmq.Frame: Socket.send(copy=False) would still copy below its threshold.
    return Tracked(socket.send(zmq.Frame(frame, track=True, copy=False), DONTWAIT, copy=False, track=True))


def readable(socket: zmq.Socket) -> bool:
    """Whether a message is there. Only after a look like this may one wait for the socket's descriptor."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)


def drain(socket: zmq.Socket, limit: int) -> Iterator[list[memoryview]]:
    """The messages that are there, at most `limit`: their parts, in ZeroMQ's memory."""
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
