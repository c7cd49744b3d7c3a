"""Events, effects and options of the machines of shards and trainers.

Payloads (frames) are opaque: what a driver puts into an event comes back in an effect, untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from graphft.runtime.protocol.machine import Effect, Event
from graphft.runtime.protocol.messages import Message
from graphft.runtime.protocol.round import Contribution

ChunkKey = tuple[int, int]
"""(pass, chunk)"""
Source = Literal["", "current", "previous"]

# -- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """`buckets`: indices of this shard's buckets. `checkpoint_every`: 0: only at the end (sync), or when the driver
    decides (async). `skips`: contributions that are not finite are discarded; else no trainer sends one. `values`: how
    many a contribution reports."""

    shard: int
    buckets: tuple[int, ...]
    run: str = ""
    checkpoint_every: int = 0
    skips: bool = False
    values: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions(ShardOptions):
    """Times in seconds. `checkpoint_steps`: more steps with a checkpoint. `reduce`: partial sums are exchanged for the
    global norm. `recovery`: this shard was restarted, and begins in recovery mode."""

    shards: int
    slots: int
    total_steps: int
    checkpoint_steps: frozenset[int] = frozenset()
    reduce: bool = False
    recovery: bool = False
    recovery_timeout: float = 10.0
    on_barrier_timeout: Literal["rollback", "proceed"] = "rollback"
    retry_interval: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncOptions(ShardOptions):
    """`batches`: of each chunk, in each of `passes`. `max_staleness`: versions that a gradient may be behind; -1: any
    number. `compensate`: copies of versions are kept, for delay compensation."""

    batches: Sequence[int]
    passes: int
    max_staleness: int = -1
    compensate: bool = False


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """`buckets`: by shard, the indices of its buckets. `total_steps`: of a sync job. Intervals: seconds after which a
    question without an answer is asked again."""

    trainer: str
    buckets: tuple[tuple[int, ...], ...]
    total_steps: int = 0
    run: str = ""
    hello_interval: float = 0.5
    retry_interval: float = 5.0


# -- events of shards -------------------------------------------------------------------------------------------------


class Received(Event, frozen=True):
    """A message (and its frame) came from `peer`, the id that the transport routes answers by.

    `fault`: what the driver found wrong with the frame, such as a length that does not fit the bucket.
    """

    peer: str
    message: Message
    payload: Any = None
    fault: str = ""


class PeerLeft(Event, frozen=True):
    """This peer does not come back."""

    peer: str


class Tick(Event, frozen=True):
    """Time has passed: a few times a second, for shards and trainers."""


class Started(Event, frozen=True):
    """Sync, the first event: the shard serves from now on. The time-out of recovery mode begins."""


class StepsWanted(Event, frozen=True):
    """Sync: no step from `step` on is wanted so far, so none of them is late."""

    step: int


class PartialsReady(Event, frozen=True):
    """Sync: the driver has computed this shard's partial sums."""

    step: int
    payload: Any


class Rollback(Event, frozen=True):
    """Sync, also for trainers: the job is in `generation`, which began at `step`; a shard has loaded that version."""

    generation: int
    step: int


class CheckpointAt(Event, frozen=True):
    """Sync: a checkpoint is wanted at this version, beside the regular ones."""

    step: int


# -- effects of shards ------------------------------------------------------------------------------------------------


class Reply(Effect, frozen=True):
    """Send `message` to `peer`. Of a `Parameters`, the frame is bucket `message.bucket` of the version that `source`
    names, read when this effect is carried out."""

    peer: str
    message: Message
    source: Source = ""


class Count(Effect, frozen=True):
    """Count what was ignored, refused or discarded under `name`; log `reason`. Also for trainers."""

    name: str
    reason: str


class TakeCheckpoint(Effect, frozen=True):
    """Clone the state of version `step` in memory now, and write it in the background."""

    step: int
    reason: str


class ComputePartials(Effect, frozen=True):
    """Sync: sum the contributions, compute the partial sums, and step PartialsReady."""

    step: int
    contributions: tuple[Contribution, ...]
    reason: str


class ApplyRound(Effect, frozen=True):
    """Sync: apply the contributions with data, in slot order. `partials`: in the order of the shards, None for one
    without; () when none are exchanged."""

    generation: int
    step: int
    contributions: tuple[Contribution, ...]
    partials: tuple[Any, ...]
    reason: str


class RoundSkipped(Effect, frozen=True):
    """Sync: the version has advanced with the same parameters. Either no slot had data, or the contributions of the
    slots `nonfinite` are not finite: then the step counts for the schedule."""

    step: int
    reason: str
    nonfinite: tuple[int, ...] = ()
    contributions: tuple[Contribution, ...] = ()


class SendShard(Effect, frozen=True):
    """Sync: send to another shard, whose answer (Welcome, Refused) need not be read."""

    shard: int
    message: Message
    payload: Any = None


class RequestRollback(Effect, frozen=True):
    """Sync: raise the job's generation above `generation`, to the newest committed checkpoint."""

    generation: int
    reason: str


class Finished(Effect, frozen=True):
    """Sync: the job's last version is there."""

    step: int


class ApplyBatch(Effect, frozen=True):
    """Async: apply this gradient, or only count it if it is not `finite`. `staleness`: versions since its parameters.

    `base`: the version of its parameters, whose copy is kept; -1: there is none. `kept`: the versions, besides the
    newest, whose copies are needed when this is applied.
    """

    pass_index: int
    chunk: int
    batch: int
    samples: int
    payloads: Mapping[int, Any]
    staleness: int
    reason: str
    base: int = -1
    kept: frozenset[int] = frozenset()
    finite: bool = True
    values: tuple[float, ...] = ()


# -- events of trainers -----------------------------------------------------------------------------------------------


class ShardUp(Event, frozen=True):
    """Connected, for the first time or again, to this incarnation (the registration's id) of a shard."""

    shard: int
    incarnation: str


class ShardDown(Event, frozen=True):
    """The connection broke, or the shard's registration is gone."""

    shard: int


class FromShard(Event, frozen=True):
    """A message (and its frame) came from a shard; `fault` as in Received."""

    shard: int
    message: Message
    payload: Any = None
    fault: str = ""


class Pushed(Event, frozen=True):
    """A bucket of the current contribution, or batch, is computed."""

    shard: int
    bucket: int
    samples: int
    payload: Any


class SlotGained(Event, frozen=True):
    """Sync: the slot is held by the claim of this revision. A newer claim of a held slot begins it anew."""

    slot: int
    claim: int = 0


class SlotLost(Event, frozen=True):
    """Sync: the slot is not held any more by the claim of this revision, or an older one."""

    slot: int
    claim: int = 0


class Begin(Event, frozen=True):
    """Sync: begin the next work, and abandon what was begun before and not closed."""


class Copied(Event, frozen=True):
    """Sync: the tensors hold this bucket at `version`. `keep`: the step changes them in place."""

    shard: int
    bucket: int
    version: int
    keep: bool = False


class Closed(Event, frozen=True):
    """Sync: the contribution to `shards` shards is whole: all buckets are pushed, or none (then it is empty).
    `values`: what it reports."""

    shards: int
    finite: bool = True
    values: tuple[float, ...] = ()


class Took(Event, frozen=True):
    """Async: work on a chunk of `batches` begins, without those that are discarded."""

    key: ChunkKey
    batches: int
    discarded: frozenset[int] = frozenset()


class Dropped(Event, frozen=True):
    """Async: the chunk is completed, released, or another's."""

    key: ChunkKey


class BeginBatch(Event, frozen=True):
    """Async: begin a batch of a chunk that was taken, and leave the one before."""

    key: ChunkKey
    batch: int


class Loaded(Event, frozen=True):
    """Async: the tensors hold what `frame` gave of this bucket. `keep`: the step changes them in place."""

    shard: int
    bucket: int
    keep: bool = False


class CloseBatch(Event, frozen=True):
    """Async: all buckets of the batch are pushed. A shard that does not answer within `push_timeout` seconds is
    skipped, or waited for when `max_skipped` batches of the chunks at hand are skipped already (-1: no limit).
    `values`: what the batch reports, for shard 0."""

    push_timeout: float
    max_skipped: int
    finite: bool = True
    values: tuple[float, ...] = ()


class Work(msgspec.Struct, frozen=True, order=True):
    """Sync: one contribution to compute."""

    step: int
    slot: int


# -- effects of trainers ----------------------------------------------------------------------------------------------


class Send(Effect, frozen=True):
    """Send a message, with `payload` as its frame unless that is None, to a shard."""

    shard: int
    message: Message
    payload: Any = None


class Fail(Effect, frozen=True):
    """This trainer cannot take part in the job."""

    reason: str
