"""Events and effects of an async trainer's machine. See async_trainer for what a driver does with them.

It shares `ShardUp`, `ShardDown`, `FromShard`, `Pushed`, `Send` and `Fail` with sync trainers, `Tick` and `Count` with
all machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphft.runtime.protocol.events import Count, Tick
from graphft.runtime.protocol.sync_events import Fail, FromShard, Pushed, Send, ShardDown, ShardUp

ChunkKey = tuple[int, int]
"""(pass, chunk)"""


@dataclass(frozen=True, slots=True)
class AsyncTrainerOptions:
    """`buckets`: per shard, the indices of its buckets. `retry_interval`: seconds before a question that is not
    answered is asked again."""

    trainer: str
    buckets: tuple[tuple[int, ...], ...]
    run: str = ""
    secret: str = field(default="", repr=False)
    retry_interval: float = 1.0


@dataclass(frozen=True, slots=True)
class Took:
    """This trainer works on a chunk of `batches` from now on, without those that are discarded."""

    key: ChunkKey
    batches: int
    discarded: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Dropped:
    """The chunk is completed, released, or somebody else's."""

    key: ChunkKey


@dataclass(frozen=True, slots=True)
class BeginBatch:
    """Begin a batch of a chunk that was taken. The one before is left, whatever has become of it."""

    key: ChunkKey
    batch: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tensors hold what `frame` gave of this bucket. `keep`: the step changes them in place."""

    shard: int
    bucket: int
    keep: bool = False


@dataclass(frozen=True, slots=True)
class CloseBatch:
    """All buckets of the batch are pushed. A shard that has not answered in `push_timeout` seconds is skipped; when
    `max_skipped` batches of the chunks at hand are skipped already (-1: no limit), it is waited for."""

    push_timeout: float
    max_skipped: int
    finite: bool = True
    values: tuple[float, ...] = ()
    """What the batch reports, for shard 0."""


AsyncTrainerEffect = Send | Fail | Count
AsyncTrainerEvent = ShardUp | ShardDown | FromShard | Tick | Took | Dropped | BeginBatch | Loaded | Pushed | CloseBatch
