"""What both ZeroMQ drivers share: socket options, sending one message, receiving one message."""

from __future__ import annotations

import threading
import time

import zmq

from graphft.runtime.protocol.messages import Message, encode
from graphft.runtime.transport.port import Limits


class Tracked:
    """The `Sent` of a frame that ZeroMQ reads in place. `handed_over` is called by the thread that owns the socket."""

    __slots__ = ("_queued", "_tracker")

    def __init__(self) -> None:
        self._queued = threading.Event()
        self._tracker: zmq.MessageTracker | None = None

    def handed_over(self, tracker: zmq.MessageTracker | None) -> None:
        """`tracker` says when ZeroMQ lets go of the frame; None: it has no use of it (any more)."""
        self._tracker = tracker
        self._queued.set()

    @property
    def done(self) -> bool:
        return self._queued.is_set() and (self._tracker is None or self._tracker.done)

    def wait(self, timeout_s: float | None = None) -> bool:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._queued.wait(timeout_s):
            return False
        if self._tracker is None:
            return True
        try:
            self._tracker.wait(-1 if end is None else max(0.0, end - time.monotonic()))
        except zmq.NotDone:
            return False
        return True


def configure(socket: zmq.Socket, limits: Limits) -> None:
    """Options of every data socket; before it binds or connects."""
    socket.linger = 0
    # No high-water mark: the protocol's own windows (one contribution per step and slot) bound what is queued, and
    # with a mark a slow peer would block the shard, or silently lose messages.
    socket.sndhwm = socket.rcvhwm = 0
    socket.copy_threshold = limits.zero_copy_from
    # Beyond this the connection is dropped before memory is taken; below, the receiver refuses with an answer.
    socket.maxmsgsize = 2 * max(limits.max_frame, limits.max_header)
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 30
    socket.tcp_keepalive_intvl = 10
    socket.tcp_keepalive_cnt = 3
    # Pings are sent and answered by ZeroMQ's own thread: a busy peer answers, a stopped or unreachable one does not.
    socket.heartbeat_ivl = int(limits.heartbeat * 1000)
    socket.heartbeat_timeout = int(limits.heartbeat_timeout * 1000)
    # A ping cannot overtake a half-written frame; this notices a peer that stopped reading in the middle of one.
    socket.tcp_maxrt = int(limits.heartbeat_timeout * 1000)


def send_message(
    socket: zmq.Socket, message: Message, frame: memoryview | None, copy: bool | None
) -> zmq.MessageTracker | None:
    """Queues header and frame on the socket (after the routing part, if any). None: nothing of the frame is in use."""
    if frame is None:
        socket.send(encode(message), zmq.DONTWAIT)
        return None
    socket.send(encode(message), zmq.DONTWAIT | zmq.SNDMORE)
    if copy or (copy is None and frame.nbytes < socket.copy_threshold):
        socket.send(frame, zmq.DONTWAIT)
        return None
    # An explicit zmq.Frame: Socket.send(copy=False) would still copy below its threshold.
    return socket.send(zmq.Frame(frame, track=True, copy=False), zmq.DONTWAIT, copy=False, track=True)


def receive_parts(socket: zmq.Socket, small: int) -> list[memoryview]:
    """One whole message, without blocking; the first `small` parts are copied, the rest stays in ZeroMQ's memory.

    Raises zmq.Again when nothing is there.
    """
    parts = [memoryview(socket.recv(zmq.DONTWAIT))]
    while socket.rcvmore:
        if len(parts) < small:
            parts.append(memoryview(socket.recv(zmq.DONTWAIT)))
        else:
            parts.append(socket.recv(zmq.DONTWAIT, copy=False).buffer)
    return parts
