"""The base of the trainers of both modes, and what a sync trainer knows of each shard, slot and bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from graphft.errors import GraphftError
from graphft.runtime.protocol.events import (
    Count,
    Fail,
    FromShard,
    Pushed,
    Send,
    ShardDown,
    ShardUp,
    TrainerOptions,
    Work,
)
from graphft.runtime.protocol.machine import Machine
from graphft.runtime.protocol.messages import Hello, answer_problem

FRAMES = 3
"""Versions of a bucket that are kept."""
LOOK_SECONDS = 1.0
"""Time that one look counts at most: what came while this process was busy was not late."""


class Silence:
    """Measures how long each shard has owed an answer. `over` may be called from any thread."""

    def __init__(self, shards: int) -> None:
        self._open = [False] * shards
        self._seconds = [0.0] * shards
        self._looked: float | None = None

    def asked(self, shard: int) -> None:
        """A question was sent that a serving shard answers at once."""
        self._open[shard] = True

    def heard(self, shard: int) -> None:
        """Something came from the shard, or it is gone."""
        self._open[shard], self._seconds[shard] = False, 0.0

    def look(self, now: float) -> None:
        """Adds the time since the last look, after all that has arrived was taken in."""
        passed = min(now - self._looked, LOOK_SECONDS) if self._looked is not None else 0.0
        self._looked = now
        for shard, is_open in enumerate(self._open):
            if is_open:
                self._seconds[shard] += passed

    def over(self, seconds: float) -> tuple[int, ...]:
        """Returns the shards that have been silent for longer."""
        return tuple(shard for shard, silent in enumerate(self._seconds) if silent > seconds)


@dataclass(slots=True)
class Connection:
    """A shard. `introduced`: it welcomed this trainer on the present connection, in sync mode in the trainer's
    generation. `asked`: when Hello, or a question that is still open, was last sent. `version`: sync, at least that of
    the shard, while introduced."""

    up: bool = False
    introduced: bool = False
    incarnation: str = ""
    asked: float = float("-inf")
    version: int = -1


class Trainer(Machine):
    """One trainer's connections."""

    MESSAGES: ClassVar[dict[type, Callable[[Any, int, Any, Any], list[Any]]]]
    """By the type of a message: handler(self, shard, message, payload) -> effects."""
    connections: Sequence[Connection]

    def __init__(self, options: TrainerOptions) -> None:
        super().__init__()
        for shard, buckets in enumerate(options.buckets):
            if not buckets:
                raise GraphftError(f"shard {shard} holds no bucket", rule="empty-shard", help="use fewer pservers")
        self.options = options
        self.silence = Silence(len(options.buckets))

    def from_shard(self, event: FromShard) -> list[Any]:
        self.silence.heard(event.shard)
        name, handler = type(event.message).__name__, self.MESSAGES.get(type(event.message))
        if handler is None:
            return [Fail(self.tell(f"shard {event.shard} sent {name} to {self.KIND}"))]
        problem = event.fault or answer_problem(self.options, event.shard, event.message, event.payload)
        if problem:
            return [Fail(self.tell(f"a wrong {name} of shard {event.shard}: {problem}"))]
        return handler(self, event.shard, event.message, event.payload)

    def shard_up(self, event: ShardUp) -> list[Any]:
        connection = self.connections[event.shard]
        if connection.introduced and connection.incarnation == event.incarnation:
            return []
        connection.up, connection.introduced, connection.incarnation = True, False, event.incarnation
        self.tell(f"shard {event.shard} is up: {event.incarnation}")
        return [self.hello(event.shard)]

    def shard_down(self, event: ShardDown) -> list[Any]:
        connection = self.connections[event.shard]
        connection.up = connection.introduced = False
        self.silence.heard(event.shard)
        self.tell(f"shard {event.shard} is down")
        return []

    def hello(self, shard: int) -> Send:
        self.connections[shard].asked = self._now
        self.silence.asked(shard)
        return Send(shard, Hello(self.options.run, self.options.trainer))

    def count(self, name: str, reason: str) -> Count:
        return Count(name, self.tell(reason))


# -- of a sync trainer ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SlotState:
    """A held slot. `next`: steps below it are contributed. `claim`: revision of the claim. `confirm`: shards whose
    version is asked for first."""

    next: int = 0
    claim: int = 0
    confirm: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Current:
    """The work that was begun. `redo`: a part of it was lost. `pushed`: (shard, bucket) done so far; `held`: those of
    them that are sent when the contribution is closed."""

    work: Work
    state: SlotState
    want: bool
    redo: bool = False
    pushed: set[tuple[int, int]] = field(default_factory=set)
    held: list[Pushed] = field(default_factory=list)


class BucketCache:
    """Frames of one bucket by version, and the version that the tensors hold (-1: none, or they have changed)."""

    __slots__ = ("frames", "loaded")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.loaded = -1
        self.frames: dict[int, Any] = {}

    def lacks(self, version: int) -> bool:
        return version not in self.frames and self.loaded != version

    def put(self, version: int, frame: Any) -> None:
        """Keeps a frame. A shard is a version or two ahead: of more, the newest are not kept."""
        if self.lacks(version):
            self.frames[version] = frame
            for newest in sorted(self.frames)[FRAMES:]:
                del self.frames[newest]

    def copied(self, version: int, keep: bool) -> None:
        """The tensors hold this version. `keep`: the step changes them, so the frame is copied again."""
        if keep:
            self.loaded = -1
        else:
            self.loaded = version
            self.frames.pop(version, None)

    def prune(self, lowest: int) -> None:
        self.frames = {v: f for v, f in self.frames.items() if v >= lowest}
