"""A trainer's ZeroMQ sockets: one DEALER per shard, all owned by one communication thread.

Other threads hand it commands through a queue and an eventfd, so that sending overlaps computing: ZeroMQ and torch's
kernels both run without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

import zmq

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import Message
from graphft.runtime.transport.address import split_endpoint
from graphft.runtime.transport.port import Frame, Limits, Released, Reply, Sent
from graphft.runtime.transport.waker import Waker
from graphft.runtime.transport.wire import Malformed, accept, check_frame, count_sent
from graphft.runtime.transport.zeromq import Tracked, configure, receive_parts, send_message


@dataclass(frozen=True, slots=True)
class _Connect:
    shard: int
    epoch: int
    address: str | None
    """None: only disconnect."""


@dataclass(frozen=True, slots=True)
class _Send:
    shard: int
    message: Message
    frame: memoryview | None
    copy: bool | None
    sent: Tracked | None


class _Link:
    """One connection: the socket, and which of the connects to its shard it belongs to."""

    def __init__(self, shard: int, epoch: int, socket: zmq.Socket) -> None:
        self.shard, self.epoch, self.socket = shard, epoch, socket


class ZmqClient:
    """The real `ClientTransport`. `identity` names this process in the shards' view of their peers."""

    def __init__(self, identity: str, limits: Limits | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._limits = limits or Limits()
        self._context = zmq.Context(io_threads=1)
        self._waker = Waker()
        self._commands: deque[_Connect | _Send] = deque()
        self._inbox: queue.SimpleQueue[tuple[int, Reply] | None] = queue.SimpleQueue()
        self._epochs: dict[int, int] = {}
        self._lock = threading.RLock()
        """Guards the numbering of connects, and that no command is queued once the thread has ended."""
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"transport {identity}", daemon=True)
        self._thread.start()

    # Called by any thread

    def connect(self, shard: int, address: str) -> None:
        split_endpoint(address)
        self._link(shard, address)

    def disconnect(self, shard: int) -> None:
        self._link(shard, None)

    def _link(self, shard: int, address: str | None) -> None:
        with self._lock:
            epoch = self._epochs[shard] = self._epochs.get(shard, 0) + 1
            self._command(_Connect(shard, epoch, address))

    def send(self, shard: int, message: Message, frame: Frame | None = None, *, copy: bool | None = None) -> Sent:
        if frame is None:
            self._command(_Send(shard, message, None, None, None))
            return Released()
        view = check_frame(frame, self._limits)
        if copy or (copy is None and view.nbytes < self._limits.zero_copy_from):
            # Copied here and now: the caller may change the frame as soon as this returns.
            self._command(_Send(shard, message, memoryview(bytes(view)), None, None))
            return Released()
        sent = Tracked()
        self._command(_Send(shard, message, view, False, sent))
        return sent

    def _command(self, command: _Connect | _Send) -> None:
        with self._lock:
            if self._closing:
                raise self._ended()
            self._commands.append(command)
        self._waker.wake()

    def receive(self, timeout_s: float | None) -> Reply | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                item = self._inbox.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if item is None and not self._closing:
                return None
            if item is None:
                self._inbox.put(None)  # for the next call
                raise self._ended()
            epoch, reply = item
            if epoch == self._epochs.get(reply.shard):
                return reply
            self.counters["stale"] += 1

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._waker.wake()
        self._thread.join()
        self._context.term()
        self._waker.close()

    def _ended(self) -> GraphftError:
        if self._failure is not None:
            return GraphftError(f"the communication thread of {self._identity} failed: {self._failure!r}",
                                rule="transport", help="restart this role; the traceback is in its log")
        return GraphftError(f"the transport of {self._identity} is closed", rule="transport",
                            help="send and connect before close()")

    # The communication thread

    def _main(self) -> None:
        links: dict[int, _Link] = {}
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll())
                for link in links.values():
                    if link.socket in ready:
                        self._drain(link)
                if self._waker.fd in ready:
                    self._waker.clear()
                    self._run_commands(links, poller)
        except BaseException as e:
            self._failure = e
            raise
        finally:
            self._end(links)

    def _end(self, links: dict[int, _Link]) -> None:
        with self._lock:
            self._closing = True
        for link in links.values():
            link.socket.close(linger=0)
        for command in self._commands:
            self._drop(command)
        self._inbox.put(None)

    def _run_commands(self, links: dict[int, _Link], poller: zmq.Poller) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Connect):
                self._relink(command, links, poller)
            elif command.shard not in links:
                self.counters["unroutable"] += 1
                self._drop(command)
            else:
                self._transmit(command, links[command.shard].socket)

    def _relink(self, command: _Connect, links: dict[int, _Link], poller: zmq.Poller) -> None:
        old = links.pop(command.shard, None)
        if old is not None:
            poller.unregister(old.socket)
            old.socket.close(linger=0)
        if command.address is None:
            return
        socket = self._context.socket(zmq.DEALER)
        configure(socket, self._limits)
        socket.ipv6 = True
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 1000
        # One connection, one routing id: an answer to an earlier connection can never reach this one.
        socket.routing_id = f"{self._identity}#{os.urandom(6).hex()}".encode()[-255:]
        socket.connect(command.address)
        poller.register(socket, zmq.POLLIN)
        links[command.shard] = _Link(command.shard, command.epoch, socket)

    def _transmit(self, command: _Send, socket: zmq.Socket) -> None:
        tracker = send_message(socket, command.message, command.frame, command.copy)
        count_sent(self.counters, command.frame)
        if command.sent is not None:
            command.sent.handed_over(tracker)

    def _drop(self, command: _Connect | _Send) -> None:
        if isinstance(command, _Send) and command.sent is not None:
            command.sent.handed_over(None)

    def _drain(self, link: _Link) -> None:
        for _ in range(self._limits.poll_batch):
            try:
                parts = receive_parts(link.socket, small=1)
            except zmq.Again:
                return
            with contextlib.suppress(Malformed):  # counted; a client answers nothing
                reply = Reply(link.shard, *accept(parts, self._limits, self.counters))
                self._inbox.put((link.epoch, reply))
