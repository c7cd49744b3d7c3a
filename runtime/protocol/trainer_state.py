"""What a sync trainer knows of each shard, each slot and each bucket. See sync_trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphft.runtime.protocol.events import Pushed, Work

RETIRED = 16
"""Incarnations of a shard that are remembered."""
FRAMES = 3
"""Versions of a bucket that are kept."""


@dataclass(slots=True)
class ShardConnection:
    """A shard. `introduced`: it welcomed this trainer on the present connection, in the trainer's generation."""

    up: bool = False
    introduced: bool = False
    incarnation: str = ""
    retired: dict[str, None] = field(default_factory=dict)
    """The last incarnations that were replaced: a welcome of theirs is late."""
    version: int = -1
    """At least this; meaningful while introduced."""
    asked: float = float("-inf")
    """When Hello or Query was sent last."""

    def expect(self, incarnation: str) -> None:
        if self.incarnation and incarnation != self.incarnation:
            self.retired[self.incarnation] = None
            for oldest in list(self.retired)[:-RETIRED]:
                del self.retired[oldest]
        self.retired.pop(incarnation, None)
        self.incarnation = incarnation


@dataclass(slots=True)
class SlotState:
    """A held slot. `next`: steps below it are contributed; `confirm`: shards whose version is asked for first;
    `claim`: revision of the claim."""

    next: int = 0
    claim: int = 0
    confirm: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Current:
    """The work that was begun. `redo`: a part of it was lost, do it again; `pushed`: (shard, bucket) done so far;
    `held`: those of them that are sent when the contribution is closed."""

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
        """Keeps a frame, unless it is there. A shard is a version or two ahead: of more, the newest are not kept."""
        if self.lacks(version):
            self.frames[version] = frame
            for newest in sorted(self.frames)[FRAMES:]:
                del self.frames[newest]

    def copied(self, version: int, keep: bool) -> None:
        """The tensors hold this version. `keep`: the step changes them in place, so the frame is copied again."""
        if keep:
            self.loaded = -1
        else:
            self.loaded = version
            self.frames.pop(version, None)

    def prune(self, lowest: int) -> None:
        self.frames = {v: f for v, f in self.frames.items() if v >= lowest}


LOOK_SECONDS = 1.0


class Silence:
    """`over` may be called from any thread."""

    def __init__(self, shards: int) -> None:
        self._open = [False] * shards
        self._seconds = [0.0] * shards
        self._looked: float | None = None

    def asked(self, shard: int) -> None:
        """A question was sent that a shard which serves answers at once."""
        self._open[shard] = True

    def heard(self, shard: int) -> None:
        """Something came from the shard; or it is gone, and nothing is expected of it."""
        self._open[shard], self._seconds[shard] = False, 0.0

    def look(self, now: float) -> None:
        """Takes in the time. To be called when what has arrived is taken in."""
        passed = min(now - self._looked, LOOK_SECONDS) if self._looked is not None else 0.0
        self._looked = now
        for shard, is_open in enumerate(self._open):
            if is_open:
                self._seconds[shard] += passed

    def over(self, seconds: float) -> tuple[int, ...]:
        """Shards that have been silent for longer."""
        return tuple(shard for shard, silent in enumerate(self._seconds) if silent > seconds)
