"""Messages between trainers, shards and the coordinator: a typed header, and at most one raw frame (a bucket's bytes).

Headers are msgspec structs, told apart by their tag; decoding refuses unknown fields, wrong types and numbers, and
foreign tags. The frame is opaque here: its receiver checks its length. `generation` is the job's; a shard refuses older
ones, and answers with its own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from graphft.runtime.protocol.chunk_queue import Discards

if TYPE_CHECKING:
    from graphft.runtime.protocol.events import AsyncOptions, ShardOptions, SyncOptions, TrainerOptions


Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Number = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
"""A revision, generation or version; -1: there is none."""
Code = Literal[
    "denied", "malformed", "unknown-peer", "stale-generation", "not-ready", "future-step", "gone", "complete", "stale"
]


class Message(msgspec.Struct, frozen=True, tag_field="t", array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Hello(Message, frozen=True, tag="hello"):
    """Introduces a peer. The transport has found out that it belongs to this job; `run` is the run that it works at."""

    run: str
    peer: str


class Welcome(Message, frozen=True, tag="welcome"):
    shard: int
    incarnation: str
    generation: Natural
    version: Natural


class Refused(Message, frozen=True, tag="refused"):
    """The request changed nothing. `code`, with the shard's generation and version, which a stranger is not told:

    denied: not of this run. malformed: no shard can accept it. unknown-peer: say Hello first (again).
    stale-generation: older than the shard's. not-ready: newer than the shard's. future-step: the shard is behind, and
    asks for a rollback. gone: the version asked for is not kept any more. complete: the job's last step is done.
    stale (async): the gradient is too many versions behind; the newest bucket follows.
    """

    code: Code
    reason: str
    generation: Number
    version: Number


def refusal_of_stranger(code: Code) -> Refused:
    """Returns an answer to a peer that has not said hello, which tells nothing of the run."""
    return Refused(code, "", -1, -1)


class Push(Message, frozen=True, tag="push"):
    """Sync: one bucket (the frame) of the contribution of `slot` at `step`; `want`: answer with the new bucket.

    `finite` is false on the last bucket of a contribution whose loss, or any gradient, is not: whichever shard gets it.
    `values`: what the contribution reports, on its last bucket for shard 0.
    """

    generation: int
    step: int
    slot: int
    bucket: int
    samples: Positive
    want: bool
    finite: bool = True
    values: tuple[float, ...] = ()


class Empty(Message, frozen=True, tag="empty"):
    """Sync: `slot` has no data at `step`; counts as a whole contribution of 0 samples."""

    generation: int
    step: int
    slot: int
    want: bool


class Pull(Message, frozen=True, tag="pull"):
    """Asks for a bucket at `version`: answered when the shard has it (it keeps the one before); -1: the newest."""

    generation: int
    version: int
    bucket: int


class Parameters(Message, frozen=True, tag="parameters"):
    """A bucket (the frame) of the parameters at `version`."""

    generation: Natural
    version: Natural
    bucket: int


class Query(Message, frozen=True, tag="query"):
    """Asks for the shard's version; answered by Welcome."""


class BatchPush(Message, frozen=True, tag="batch"):
    """Async: one bucket (the frame) of a batch, computed from `version` of this generation, the lowest among the
    shard's buckets; -1: of another generation, which counts as the first version. `finite`, `values`: as in Push."""

    generation: int
    pass_index: int
    chunk: int
    batch: int
    batches: int
    bucket: int
    samples: Positive
    version: int
    finite: bool = True
    values: tuple[float, ...] = ()


class BatchAck(Message, frozen=True, tag="ack"):
    """Async: the batch is in the shard's ledger, applied now (`fresh`) or before. `Parameters` follow."""

    pass_index: int
    chunk: int
    batch: int
    version: Natural
    fresh: bool


class LedgerQuery(Message, frozen=True, tag="ledger?"):
    """Async: asks which batches of `chunk` this shard has applied."""

    pass_index: int
    chunk: int


class Ledger(Message, frozen=True, tag="ledger"):
    """Async: the applied batches of a chunk as [start, end) ranges; [0, 2**31 - 1): all of them."""

    pass_index: int
    chunk: int
    ranges: list[tuple[int, int]]


class Partials(Message, frozen=True, tag="partials"):
    """Shard to shard: the partial sums (the frame: float64) of this shard's slices for global-norm clipping."""

    generation: int
    step: int
    shard: int


class PartialsQuery(Message, frozen=True, tag="partials?"):
    """Shard to shard: asks again for the partials of `step`."""

    generation: int
    step: int
    shard: int


class GetTasks(Message, frozen=True, tag="get-tasks"):
    """Asks the coordinator for tasks of a pass. `call` numbers a process's calls; a repeated one is answered alike.

    Async: about `want` of any. Sync: `chunks` for `slot`, which the trainer holds by the claim with revision
    `holds`; `generation`: the job's; `lowest`: the version that every shard has reached.
    """

    call: int
    trainer: str
    pass_index: int
    want: int = 0
    slot: int = -1
    holds: Number = 0
    chunks: list[int] = []
    generation: Number = 0
    lowest: Number = 0


class Tasks(Message, frozen=True, tag="tasks"):
    """Tasks (chunk, attempt) that the trainer holds from now on, and what is discarded of them. `pass_index`: the pass
    that is worked on; if it is not the one asked for, no task is given."""

    call: int
    pass_index: int
    tasks: list[tuple[int, int]]
    discarded: list[tuple[int, Discards]] = []


class FinishTasks(Message, frozen=True, tag="finish-tasks"):
    """These tasks (chunk, attempt) are applied. `fences` (async): by shard, the revision of the record of the
    generation that has acknowledged them; if a shard has begun another one, the tasks are done again."""

    call: int
    trainer: str
    pass_index: int
    tasks: list[tuple[int, int]]
    fences: list[Number] = []


class ReleaseTasks(Message, frozen=True, tag="release-tasks"):
    """Gives tasks (chunk, attempt, batches applied) back, without a failure."""

    call: int
    trainer: str
    pass_index: int
    tasks: list[tuple[int, int, int]]


class RenewTasks(Message, frozen=True, tag="renew-tasks"):
    """The trainer holds these tasks (pass, chunk, attempt, batches applied), and no others, of its calls up to `call`.
    Not answered."""

    call: int
    trainer: str
    tasks: list[tuple[int, int, int, int]]


class FailTask(Message, frozen=True, tag="fail-task"):
    """A batch of the task cannot be computed. `records`: positions in the chunk of those to blame, if known; `certain`:
    one failure is too many; `rest`: nor can the batches behind it."""

    call: int
    trainer: str
    pass_index: int
    chunk: int
    attempt: int
    batch: int
    reason: str
    records: list[int] = []
    certain: bool = False
    rest: bool = False


class TaskFailed(Message, frozen=True, tag="task-failed"):
    """The failure is counted, with the outcome of a `chunk_queue.Change`; "": the task is another's by now."""

    call: int
    outcome: str
    reason: str = ""
    cause: str = ""


class RequeueTasks(Message, frozen=True, tag="requeue-tasks"):
    """Async: a shard that went back lacks some of these tasks (chunk, batches applied)."""

    call: int
    trainer: str
    pass_index: int
    tasks: list[tuple[int, int]]


class CloseTasks(Message, frozen=True, tag="close-tasks"):
    """The last step is applied. `complete`: by a user's own loops; the job is complete when none is registered."""

    call: int
    trainer: str
    complete: bool = False


class TasksSettled(Message, frozen=True, tag="tasks-settled"):
    """The call is recorded, but for tasks that were another's, or to do already (`refused`)."""

    call: int
    refused: list[int] = []


class TasksRefused(Message, frozen=True, tag="tasks-refused"):
    """The call changed nothing. malformed: no coordinator can accept it. unknown: the trainer is not known to be
    registered; ask again. fenced: the slot is another's by now."""

    call: int
    code: str
    reason: str


class RequestSaveModel(Message, frozen=True, tag="request-save-model"):
    """Asks to be the one trainer that saves the model, for some seconds."""

    call: int
    trainer: str
    seconds: float


class SaveModelAnswer(Message, frozen=True, tag="save-model-answer"):
    """`seconds`: until another trainer may save the model."""

    call: int
    granted: bool
    seconds: float


TASK_CALLS = (
    GetTasks | FinishTasks | ReleaseTasks | RenewTasks | FailTask | RequeueTasks | CloseTasks | RequestSaveModel
)
TASK_ANSWERS = Tasks | TasksSettled | TasksRefused | TaskFailed | SaveModelAnswer

TO_SHARDS = Hello | Query | Push | Empty | Pull | BatchPush | LedgerQuery | Partials | PartialsQuery
FROM_SHARDS = Welcome | Refused | Parameters | BatchAck | Ledger
AnyMessage = TO_SHARDS | FROM_SHARDS | TASK_CALLS | TASK_ANSWERS

_decoder = msgspec.msgpack.Decoder(AnyMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(data)


# -- what is wrong with a message, whatever the state of its receiver is; "" if nothing -------------------------------

WITH_A_FRAME = (Push, BatchPush, Parameters)
"""Messages that need a frame. `Partials` may have one; others have none."""


def sync_problem(options: SyncOptions, message: Message, payload: Any) -> str:
    """At a sync shard. A step behind the last one is no error: a trainer that does not know the end is told."""
    if problem := _shard_problem(options, message, payload):
        return problem
    if isinstance(message, Push | Empty) and not 0 <= message.slot < options.slots:
        return f"there is no slot {message.slot}"
    if isinstance(message, Push | Empty) and not 0 <= message.step <= options.total_steps:
        return f"there is no step {message.step}: the job has {options.total_steps}"
    if isinstance(message, Pull) and not -1 <= message.version <= options.total_steps:
        return f"there is no version {message.version}: the job has {options.total_steps} steps"
    if isinstance(message, Partials | PartialsQuery):
        other = options.reduce and 0 <= message.shard < options.shards and message.shard != options.shard
        return "" if other else f"{message.shard} is no shard that this one exchanges partial sums with"
    return ""


def async_problem(options: AsyncOptions, message: Message, payload: Any) -> str:
    """At an async shard."""
    if problem := _shard_problem(options, message, payload):
        return problem
    if isinstance(message, BatchPush | LedgerQuery) and not (
        0 <= message.pass_index < options.passes and 0 <= message.chunk < len(options.batches)
    ):
        return f"there is no chunk {message.chunk} of pass {message.pass_index}"
    if isinstance(message, BatchPush) and message.batches != options.batches[message.chunk]:
        return f"chunk {message.chunk} has {options.batches[message.chunk]} batches, not {message.batches}"
    if isinstance(message, BatchPush) and not 0 <= message.batch < message.batches:
        return f"there is no batch {message.batch} of {message.batches}"
    return ""


def _shard_problem(options: ShardOptions, message: Message, payload: Any) -> str:
    if problem := _frame_problem(message, payload):
        return problem
    if isinstance(message, Push | BatchPush | Pull) and message.bucket not in options.buckets:
        return f"this shard has no bucket {message.bucket}"
    if not isinstance(message, Push | BatchPush):
        return ""
    if len(message.values) not in (0, options.values):
        return f"a push reports {len(message.values)} values, expected {options.values}"
    return "" if message.finite or options.skips else "a contribution that is not finite: this job leaves none out"


def answer_problem(options: TrainerOptions, shard: int, message: Message, payload: Any) -> str:
    """At a trainer, of what a shard tells it."""
    if problem := _frame_problem(message, payload):
        return problem
    if isinstance(message, Parameters) and message.bucket not in options.buckets[shard]:
        return f"it has no bucket {message.bucket}"
    if isinstance(message, Welcome | Refused | Parameters) and 0 < options.total_steps < message.version:
        return f"version {message.version}, but the job has {options.total_steps} steps"
    if isinstance(message, Ledger):
        edges = [edge for pair in message.ranges for edge in pair]
        if any(a >= b for a, b in pairwise([-1, *edges])):
            return "the ranges of a ledger are not in order"
    return ""


def _frame_problem(message: Message, payload: Any) -> str:
    if isinstance(message, WITH_A_FRAME):
        return f"{type(message).__name__} without a frame" if payload is None else ""
    return "" if payload is None or isinstance(message, Partials) else f"no frame belongs to {type(message).__name__}"
