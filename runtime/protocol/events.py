"""Events and effects that the shards' state machines share.

Payloads (frames) are opaque: whatever the driver puts into an event comes back in an effect, untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from graphft.runtime.protocol.messages import Message

# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A shard got a message (and its frame) from `peer`, the id that the transport routes answers by.

    `fault`: what the driver found wrong with the frame (a length that does not fit the bucket, say), else "".
    """

    peer: str
    message: Message
    payload: Any = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """This peer will not come back: forget that it was introduced, and what it waits for."""

    peer: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. A few times a second is enough."""


# -- effects --------------------------------------------------------------------------------------------------------

Source = Literal["", "current", "previous"]


@dataclass(frozen=True, slots=True)
class Reply:
    """Send `message` to `peer`. For a `Parameters`, `source` says which bytes are the frame: those of bucket
    `message.bucket` of the shard's "current" or "previous" version, read when this effect is carried out."""

    peer: str
    message: Message
    source: Source = ""


@dataclass(frozen=True, slots=True)
class Count:
    """Something was ignored, refused or discarded: count it under `name`, log `reason`."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Clone the state of version `step` in memory now, and write it in the background."""

    step: int
    reason: str
