"""Events, effects and options of the machines of shards and trainers.

Payloads (frames) are opaque: what a driver puts into an event comes back in an effect, untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
    many a contribution reports. `max_peers`: names of peers that are known at once; the first one gives way to more."""

    shard: int
    buckets: tuple[int, ...]
    run: str = ""
    secret: str = field(default="", repr=False)
    checkpoint_every: int = 0
    skips: bool = False
    values: int = 0
    max_peers: int = 256


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
    secret: str = field(default="", repr=False)
    hello_interval: float = 0.5
    retry_interval: float = 5.0


# -- events of shards -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message (and its frame) came from `peer`, the id that the transport routes answers by.

    `fault`: what the driver found wrong with the frame, such as a length that does not fit the bucket.
    """

    peer: str
    message: Message
    payload: Any = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """This peer does not come back."""

    peer: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a few times a second, for shards and trainers."""


@dataclass(frozen=True, slots=True)
class Started:
    """Sync, the first event: the shard serves from now on. The time-out of recovery mode begins."""


@dataclass(frozen=True, slots=True)
class StepsWanted:
    """Sync: no step from `step` on is wanted so far, so none of them is late."""

    step: int


@dataclass(frozen=True, slots=True)
class PartialsReady:
    """Sync: the driver has computed this shard's partial sums."""

    generation: int
    step: int
    payload: Any


@dataclass(frozen=True, slots=True)
class RoundApplied:
    """Sync: the driver has carried out ApplyRound."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """Sync, also for trainers: the job is in `generation`, which began at `step`; a shard has loaded that version."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointAt:
    """Sync: a checkpoint is wanted at this version, beside the regular ones."""

    step: int


SyncShardEvent = (
    Started | Received | PeerLeft | PartialsReady | RoundApplied | Rollback | CheckpointAt | StepsWanted | Tick
)
AsyncShardEvent = Received | PeerLeft | Tick

# -- effects of shards ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """Send `message` to `peer`. Of a `Parameters`, the frame is bucket `message.bucket` of the version that `source`
    names, read when this effect is carried out."""

    peer: str
    message: Message
    source: Source = ""


@dataclass(frozen=True, slots=True)
class Count:
    """Count what was ignored, refused or discarded under `name`; log `reason`. Also for trainers."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Clone the state of version `step` in memory now, and write it in the background."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class ComputePartials:
    """Sync: sum the contributions, compute the partial sums, and step PartialsReady."""

    generation: int
    step: int
    contributions: tuple[Contribution, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ApplyRound:
    """Sync: apply the contributions with data, in slot order, and step RoundApplied. `partials`: in the order of the
    shards, None for one without; () when none are exchanged."""

    generation: int
    step: int
    contributions: tuple[Contribution, ...]
    partials: tuple[Any, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundSkipped:
    """Sync: the version has advanced with the same parameters. Either no slot had data, or the contributions of the
    slots `nonfinite` are not finite: then the step counts for the schedule."""

    step: int
    reason: str
    nonfinite: tuple[int, ...] = ()
    contributions: tuple[Contribution, ...] = ()


@dataclass(frozen=True, slots=True)
class SendShard:
    """Sync: send to another shard, whose answer (Welcome, Refused) need not be read."""

    shard: int
    message: Message
    payload: Any = None


@dataclass(frozen=True, slots=True)
class RequestRollback:
    """Sync: raise the job's generation above `generation`, to the newest committed checkpoint."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Sync: the job's last version is there."""

    step: int


@dataclass(frozen=True, slots=True)
class ApplyBatch:
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


SyncShardEffect = (
    Reply
    | Count
    | TakeCheckpoint
    | ComputePartials
    | ApplyRound
    | RoundSkipped
    | SendShard
    | RequestRollback
    | Finished
)
AsyncShardEffect = Reply | Count | TakeCheckpoint | ApplyBatch

# -- events of trainers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardUp:
    """Connected, for the first time or again, to this incarnation (the registration's id) of a shard."""

    shard: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class ShardDown:
    """The connection broke, or the shard's registration is gone."""

    shard: int


@dataclass(frozen=True, slots=True)
class FromShard:
    """A message (and its frame) came from a shard; `fault` as in Received."""

    shard: int
    message: Message
    payload: Any = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A bucket of the current contribution, or batch, is computed."""

    shard: int
    bucket: int
    samples: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SlotGained:
    """Sync: the slot is held by the claim of this revision. A newer claim of a held slot begins it anew."""

    slot: int
    claim: int = 0


@dataclass(frozen=True, slots=True)
class SlotLost:
    """Sync: the slot is not held any more by the claim of this revision, or an older one."""

    slot: int
    claim: int = 0


@dataclass(frozen=True, slots=True)
class Begin:
    """Sync: begin the next work, and abandon what was begun before and not closed."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Sync: the tensors hold this bucket at `version`. `keep`: the step changes them in place."""

    shard: int
    bucket: int
    version: int
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """Sync: the contribution to `shards` shards is whole: all buckets are pushed, or none (then it is empty).
    `values`: what it reports."""

    shards: int
    finite: bool = True
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Took:
    """Async: work on a chunk of `batches` begins, without those that are discarded."""

    key: ChunkKey
    batches: int
    discarded: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Dropped:
    """Async: the chunk is completed, released, or another's."""

    key: ChunkKey


@dataclass(frozen=True, slots=True)
class BeginBatch:
    """Async: begin a batch of a chunk that was taken, and leave the one before."""

    key: ChunkKey
    batch: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Async: the tensors hold what `frame` gave of this bucket. `keep`: the step changes them in place."""

    shard: int
    bucket: int
    keep: bool = False


@dataclass(frozen=True, slots=True)
class CloseBatch:
    """Async: all buckets of the batch are pushed. A shard that does not answer within `push_timeout` seconds is
    skipped, or waited for when `max_skipped` batches of the chunks at hand are skipped already (-1: no limit).
    `values`: what the batch reports, for shard 0."""

    push_timeout: float
    max_skipped: int
    finite: bool = True
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Work:
    """Sync: one contribution to compute."""

    step: int
    slot: int


TrainerControl = ShardUp | ShardDown | SlotGained | SlotLost | Rollback
"""What a sync trainer's daemon thread finds in etcd, for its main thread."""
SyncTrainerEvent = TrainerControl | FromShard | Tick | Begin | Copied | Pushed | Closed
AsyncTrainerEvent = ShardUp | ShardDown | FromShard | Tick | Took | Dropped | BeginBatch | Loaded | Pushed | CloseBatch

# -- effects of trainers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, with `payload` as its frame unless that is None, to a shard."""

    shard: int
    message: Message
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Fail:
    """This trainer cannot take part in the job."""

    reason: str


TrainerEffect = Send | Fail | Count
