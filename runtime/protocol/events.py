"""Events and effects that the shards' state machines share.

Payloads (frames) are opaque: whatever the driver puts into an event comes back in an effect, untouched.


Events and effects of the machines of sync mode. See sync_shard and sync_trainer for what a driver does with them.

Events and effects of an async trainer's machine. See async_trainer for what a driver does with them.

It shares `ShardUp`, `ShardDown`, `FromShard`, `Pushed`, `Send` and `Fail` with sync trainers, `Tick` and `Count` with
all machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from graphft.runtime.protocol.messages import Message
from graphft.runtime.protocol.round import Contribution

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


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """Times in seconds. `buckets`: indices of this shard's buckets. `reduce`: partial sums are exchanged (global norm).

    `recovery`: this is a restarted shard, in recovery mode. `checkpoint_every` 0: only at the end. `max_peers`: names
    of trainers and shards that are known at once; above it the one that was introduced first gives way.
    """

    shard: int
    shards: int
    slots: int
    buckets: tuple[int, ...]
    total_steps: int
    run: str = ""
    secret: str = field(default="", repr=False)
    checkpoint_every: int = 0
    checkpoint_steps: frozenset[int] = frozenset()
    """Others at which one is taken."""
    reduce: bool = False
    recovery: bool = False
    recovery_timeout: float = 10.0
    on_barrier_timeout: Literal["rollback", "proceed"] = "rollback"
    skips: bool = False
    """A step with a contribution that is not finite is discarded; else no trainer sends one."""
    retry_interval: float = 1.0
    max_peers: int = 256
    values: int = 0
    """How many values each contribution reports."""


# -- events of a shard (and Received, PeerLeft, Tick) -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The first event: the shard serves from now on, which is when recovery mode's time-out begins."""


@dataclass(frozen=True, slots=True)
class StepsWanted:
    """No step from `step` on is wanted so far: nothing is late that would be of one."""

    step: int


@dataclass(frozen=True, slots=True)
class PartialsReady:
    """The driver has computed the own partial sums."""

    generation: int
    step: int
    payload: Any


@dataclass(frozen=True, slots=True)
class RoundApplied:
    """The driver has carried out ApplyRound."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """The job is in `generation` now, which began at `step`; that version is loaded."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointAt:
    """Take a checkpoint at this version, beside the regular ones."""

    step: int


# -- effects of a shard (and Reply, Count, TakeCheckpoint) ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComputePartials:
    generation: int
    step: int
    contributions: tuple[Contribution, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ApplyRound:
    """`contributions`: those with data, in slot order. `partials`: one per shard, in order, None for a shard without;
    () when nothing is exchanged."""

    generation: int
    step: int
    contributions: tuple[Contribution, ...]
    partials: tuple[Any, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundSkipped:
    """The version advanced, and the parameters stay: no slot had data at this step, and nothing is to be computed; or
    the contributions of the slots `nonfinite` are not finite: the step counts, for the schedule too. `contributions`:
    as in ApplyRound."""

    step: int
    reason: str
    nonfinite: tuple[int, ...] = ()
    contributions: tuple[Contribution, ...] = ()


@dataclass(frozen=True, slots=True)
class SendShard:
    """Send to another shard's socket; what it answers (Welcome, Refused) need not be read."""

    shard: int
    message: Message
    payload: Any = None


@dataclass(frozen=True, slots=True)
class RequestRollback:
    """Raise the job's generation above `generation`, to the newest committed checkpoint."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The job's last version is there."""

    step: int


ShardEffect = (
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

ShardEvent = Started | Received | PeerLeft | PartialsReady | RoundApplied | Rollback | CheckpointAt | StepsWanted | Tick


# -- a trainer: options -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """`buckets`: per shard, the indices of its buckets. Intervals in seconds: how long an answer is waited for before
    asking again."""

    trainer: str
    buckets: tuple[tuple[int, ...], ...]
    total_steps: int
    run: str = ""
    secret: str = field(default="", repr=False)
    hello_interval: float = 0.5
    retry_interval: float = 5.0


@dataclass(frozen=True, slots=True, order=True)
class Work:
    """One contribution to compute."""

    step: int
    slot: int


# -- events of a trainer (and Rollback, Tick) -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardUp:
    """Connected to this incarnation (the registration's id) of a shard: for the first time, or again."""

    shard: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class ShardDown:
    """The connection broke, or the shard's registration is gone."""

    shard: int


@dataclass(frozen=True, slots=True)
class FromShard:
    """A message (and its frame) from a shard. `fault`: what the driver found wrong with the frame, else ""."""

    shard: int
    message: Message
    payload: Any = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class SlotGained:
    """The slot is this trainer's, by the claim of this revision. A newer claim of a held slot begins it anew."""

    slot: int
    claim: int = 0


@dataclass(frozen=True, slots=True)
class SlotLost:
    """The slot is not this trainer's by the claim of this revision, or an older one, any more."""

    slot: int
    claim: int = 0


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin the next work; what was begun before, and not closed, is abandoned."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The tensors hold this bucket at `version` now. `keep`: the step changes them in place."""

    shard: int
    bucket: int
    version: int
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Pushed:
    """A bucket of the current contribution is computed."""

    shard: int
    bucket: int
    samples: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Closed:
    """The current contribution to `shards` shards is whole: all buckets are pushed, or none (then it is empty)."""

    shards: int
    finite: bool = True
    values: tuple[float, ...] = ()
    """What it reports."""


# -- effects of a trainer (and Count) ---------------------------------------------------------------------------------


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
TrainerControl = ShardUp | ShardDown | SlotGained | SlotLost | Rollback
"""What a trainer's daemon thread finds in etcd, for its main thread to take in."""
TrainerEvent = TrainerControl | FromShard | Tick | Begin | Copied | Pushed | Closed


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
