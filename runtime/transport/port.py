"""The port of the data plane: what a shard and a trainer ask of a transport.

A message is a small typed header (`runtime/protocol/messages.py`) and at most one frame of raw bytes. Delivery is at
most once and in order per connection; a connection that breaks loses what was in flight. The protocol above copes with
both, so that a driver needs no retries.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from graphft.runtime.protocol.messages import AnyMessage, Message

Frame = Any
"""Any contiguous object with the buffer protocol: bytes, memoryview (`buffers.byte_view` of a tensor)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what a transport accepts, in bytes, and its heartbeats, in seconds."""

    max_frame: int = 64 << 20
    max_header: int = 1 << 20
    max_queued: int = 10_000
    """Messages of one peer that wait, at most: beyond that its connection is not read, and answers to it are dropped.
    It is more than the protocol ever has under way."""
    zero_copy_from: int = 64 << 10
    """Smaller frames are copied while sending: tracking them costs more than the copy."""
    poll_batch: int = 256
    """Messages that one poll returns at most, so that a flood cannot starve the caller's other duties."""
    heartbeat: float = 2.0
    """Interval of the pings that notice frozen peers and broken networks."""
    heartbeat_timeout: float = 10.0


class Received(NamedTuple):
    """A message that a server got. `peer` addresses the answer, and holds for one connection."""

    peer: bytes
    message: AnyMessage
    frame: memoryview | None = None


class Reply(NamedTuple):
    """A message that a client got from a shard."""

    shard: int
    message: AnyMessage
    frame: memoryview | None = None


class Sent(Protocol):
    """Says when the frame of a sent message may be changed again. It says nothing about delivery."""

    @property
    def done(self) -> bool:
        """True once the transport has let go of the frame's memory: written out, or dropped."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until `done`; returns whether it is."""


class Released:
    """The `Sent` of a message whose frame was copied, dropped, or never there."""

    done = True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True


class ServerTransport(Protocol):
    """A shard's side. One thread owns it; only `wake` may be called from others."""

    @property
    def counters(self) -> Counter[str]:
        """Messages and bytes `received` and `sent`, `unroutable` answers, refusals as `refused.<reason>`."""

    def bind(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listens; returns the address for clients. Port 0: any free one. Raises GraphftError when it is taken."""

    def poll(self, timeout_s: float | None) -> list[Received]:
        """Returns what arrived, in order per peer; waits for it for `timeout_s` (None: for ever), or until woken."""

    def send(self, peer: bytes, message: Message, frame: Frame | None = None) -> Sent:
        """Sends without blocking; to a peer that is gone, the message is counted and dropped.

        The frame must not change until the result is `done`.
        """

    def wake(self) -> None:
        """Makes the running (or the next) poll return. From any thread, also after close."""

    def close(self) -> None:
        """Stops at once; what is still queued is dropped. Repeatable."""


class ClientTransport(Protocol):
    """A trainer's side: connections to the shards. Any thread may call it; one at a time receives."""

    @property
    def counters(self) -> Counter[str]:
        """As a server's; and `stale` replies of connections that were replaced."""

    def connect(self, shard: int, address: str) -> None:
        """(Re)connects to a shard's incarnation at `address`; what is queued to or from an earlier one is dropped.

        Returns at once; messages are kept until the connection stands. One that breaks is made again by a later send.
        """

    def disconnect(self, shard: int) -> None:
        """Closes the connection, if there is one, and drops what is queued."""

    def send(self, shard: int, message: Message, frame: Frame | None = None) -> Sent:
        """As a server's `send`; to a shard that is not connected, the message is counted and dropped, and so is a frame
        of `Limits.zero_copy_from` bytes or more before the shard has answered on this connection."""

    def receive(self, timeout_s: float | None) -> Reply | None:
        """Returns the next reply; None when `timeout_s` (None: never) have passed or `wake` was called."""

    def wake(self) -> None:
        """Makes one receive return None, once what arrived before is taken."""

    def close(self) -> None:
        """Stops at once; what is still queued is dropped. Repeatable."""
