"""What travels between trainers, shards and the coordinator: a small typed header, and at most one raw frame (a
bucket's bytes).

Headers are msgspec structs, told apart by their tag; unknown fields, wrong types and foreign tags are refused by
decoding. The frame is opaque here: its length is checked against the program's bucket layout by the receiver.
`generation` is the job's; a shard refuses older ones and answers with its own.


What is wrong with a message whatever the receiver's state is: compared with the program alone, before anything looks
at it. Each function returns a text for the refusal, "" if nothing is wrong."""

from __future__ import annotations

import hmac
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from graphft.runtime.protocol.chunk_queue import Discards

if TYPE_CHECKING:
    from graphft.runtime.protocol.async_shard import AsyncOptions
    from graphft.runtime.protocol.events import AsyncTrainerOptions, SyncOptions, TrainerOptions

UNTOLD = -1
"""Generation and version in an answer that tells neither."""


class Message(msgspec.Struct, frozen=True, tag_field="t", array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Hello(Message, frozen=True, tag="hello"):
    """A peer introduces itself, and shows that it belongs to this run: `run` is the run's id, `secret` what only those
    know that may read the run's records in etcd."""

    run: str
    secret: str
    peer: str

    def __repr__(self) -> str:
        """Without the secret: texts are logged."""
        return f"Hello(run={self.run!r}, peer={self.peer!r})"

    def admits(self, run: str, secret: str) -> bool:
        """Whether this peer belongs to that run. Takes as long for a secret that is nearly right as for any other."""
        mine, shown = f"{run}\n{secret}".encode(), f"{self.run}\n{self.secret}".encode("utf-8", "replace")
        return hmac.compare_digest(mine, shown)


class Welcome(Message, frozen=True, tag="welcome"):
    shard: int
    incarnation: str
    generation: int
    version: int


class Refused(Message, frozen=True, tag="refused"):
    """The request changed nothing. `code`, with the shard's generation and version (a peer that was not admitted is
    told neither, nor a reason):

    denied: not of this run. malformed: no shard can accept it. unknown-peer: say Hello first (again).
    stale-generation: older than the shard's. not-ready: newer than the shard's. future-step: the shard is behind, and
    asks for a rollback. gone: the version asked for is not kept any more. complete: the job's last step is done.
    stale (async): the gradient is too many versions behind; the newest bucket follows.
    """

    code: str
    reason: str
    generation: int
    version: int


def refusal_of_stranger(code: str) -> Refused:
    """What a peer is told that has not shown the run's secret: nothing of the run."""
    return Refused(code, "", UNTOLD, UNTOLD)


class Push(Message, frozen=True, tag="push"):
    """Sync: one bucket (the frame) of the contribution of `slot` at `step`; `want`: answer with the new bucket.

    `finite` is false on the last bucket of a contribution whose loss, or any gradient, is not: whichever shard gets it.
    `values`: what the contribution reports, on its last bucket for shard 0.
    """

    generation: int
    step: int
    slot: int
    bucket: int
    samples: int
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

    generation: int
    version: int
    bucket: int


class Query(Message, frozen=True, tag="query"):
    """Asks for the shard's version; answered by Welcome."""


class BatchPush(Message, frozen=True, tag="batch"):
    """Async: one bucket (the frame) of batch `batch` of `chunk` in pass `pass_index`, computed from `version` of this
    generation, the lowest among the shard's buckets; -1: from another's, which counts as the first version. `finite`,
    `values`: as in Push."""

    generation: int
    pass_index: int
    chunk: int
    batch: int
    batches: int
    bucket: int
    samples: int
    version: int
    finite: bool = True
    values: tuple[float, ...] = ()


class BatchAck(Message, frozen=True, tag="ack"):
    """Async: the batch is in the shard's ledger: applied now (`fresh`) or before. Buckets follow as `Parameters`."""

    pass_index: int
    chunk: int
    batch: int
    version: int
    fresh: bool


class LedgerQuery(Message, frozen=True, tag="ledger?"):
    """Async: asks which batches of `chunk` this shard has applied."""

    pass_index: int
    chunk: int


class Ledger(Message, frozen=True, tag="ledger"):
    """Async: the applied batches of a chunk as [start, end) ranges; [0, 2**31 - 1) when it is applied wholly."""

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
    """Asks the coordinator for tasks of a pass. `call`: counts a process's calls; the same one again is answered alike.

    Async: about `want` of them, of any. Sync: `chunks` of the pass, for `slot`, which the trainer holds: `holds` is the
    revision of its claim. `generation`: the job's. `lowest`: every shard has reached this version.
    """

    call: int
    trainer: str
    pass_index: int
    want: int = 0
    slot: int = -1
    holds: int = 0
    chunks: list[int] = []
    generation: int = 0
    lowest: int = 0


class Tasks(Message, frozen=True, tag="tasks"):
    """Tasks that the trainer holds from now on: chunks, each with the number of this attempt; and what is discarded of
    them. `pass_index`: the pass that is worked on; if it is not the one asked for, no task is given."""

    call: int
    pass_index: int
    tasks: list[tuple[int, int]]
    discarded: list[tuple[int, Discards]] = []


class FinishTasks(Message, frozen=True, tag="finish-tasks"):
    """These tasks (chunk, attempt) are applied wholly. `fences` (async): by shard, the revision of the record of the
    generation in which it has acknowledged them: if a shard has begun another one, the tasks are to do again."""

    call: int
    trainer: str
    pass_index: int
    tasks: list[tuple[int, int]]
    fences: list[int] = []


class ReleaseTasks(Message, frozen=True, tag="release-tasks"):
    """The trainer gives these tasks (chunk, attempt, batches applied) back: no failure."""

    call: int
    trainer: str
    pass_index: int
    tasks: list[tuple[int, int, int]]


class RenewTasks(Message, frozen=True, tag="renew-tasks"):
    """The trainer is at work, and holds these tasks (pass, chunk, attempt, batches applied) of its calls up to `call`,
    and no others. Not answered."""

    call: int
    trainer: str
    tasks: list[tuple[int, int, int, int]]


class FailTask(Message, frozen=True, tag="fail-task"):
    """This batch of the task cannot be computed. `records`: positions in the chunk of those to blame, if known;
    `certain`: no trainer can read them, one failure is too many. `rest`: nor can the batches behind it."""

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
    """The failure is counted, with this outcome (of a `chunk_queue.Change`); "": the task is another's by now."""

    call: int
    outcome: str
    reason: str = ""
    cause: str = ""


class RequeueTasks(Message, frozen=True, tag="requeue-tasks"):
    """Async: a shard that has gone back lacks some of these tasks (chunk, batches applied): to do again."""

    call: int
    trainer: str
    pass_index: int
    tasks: list[tuple[int, int]]


class CloseTasks(Message, frozen=True, tag="close-tasks"):
    """The last step is applied: nothing is left to do. `complete`: nor is there any process that says so of the job: it
    is complete when no trainer is registered any more (a loop of a user's own)."""

    call: int
    trainer: str
    complete: bool = False


class TasksSettled(Message, frozen=True, tag="tasks-settled"):
    """What was told is recorded, but for tasks that were another's by then, or to do already (`refused`)."""

    call: int
    refused: list[int] = []


class TasksRefused(Message, frozen=True, tag="tasks-refused"):
    """The call changed nothing. malformed: no coordinator can accept it. unknown: the trainer is not registered, as far
    as is known here; ask again. fenced: the slot is another's by now."""

    call: int
    code: str
    reason: str


class RequestSaveModel(Message, frozen=True, tag="request-save-model"):
    """Asks to be the one trainer that saves the model, for so many seconds."""

    call: int
    trainer: str
    seconds: float


class SaveModelAnswer(Message, frozen=True, tag="save-model-answer"):
    """Whether it is. `seconds`: until another one may be."""

    call: int
    granted: bool
    seconds: float


TASK_CALLS = (
    GetTasks | FinishTasks | ReleaseTasks | RenewTasks | FailTask | RequeueTasks | CloseTasks | RequestSaveModel
)
TASK_ANSWERS = Tasks | TasksSettled | TasksRefused | TaskFailed | SaveModelAnswer

CODES = frozenset(
    {"denied", "malformed", "unknown-peer", "stale-generation", "not-ready", "future-step", "gone", "complete", "stale"}
)
"""Of refusals."""

AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Push
    | Empty
    | Pull
    | Parameters
    | Query
    | BatchPush
    | BatchAck
    | LedgerQuery
    | Ledger
    | Partials
    | PartialsQuery
    | TASK_CALLS
    | TASK_ANSWERS
)
"""What `decode` accepts."""

_decoder = msgspec.msgpack.Decoder(AnyMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Raises msgspec.DecodeError (or its subclass ValidationError) for what is no message of ours."""
    return _decoder.decode(data)


WITH_A_FRAME = (Push, BatchPush, Parameters)
"""Messages that mean nothing without a frame. `Partials` have one or none; all others have none."""


def sync_problem(options: SyncOptions, message: Message, payload: Any) -> str:
    """For a sync shard."""
    if problem := _frame_problem(message, payload):
        return problem
    if isinstance(message, Push | Pull) and message.bucket not in options.buckets:
        return f"this shard has no bucket {message.bucket}"
    if isinstance(message, Push | Empty):
        return _contribution_problem(options, message)
    if isinstance(message, Pull) and not -1 <= message.version <= options.total_steps:
        return f"there is no version {message.version}: the job has {options.total_steps} steps"
    if isinstance(message, Partials | PartialsQuery):
        other = options.reduce and 0 <= message.shard < options.shards and message.shard != options.shard
        return "" if other else f"{message.shard} is no shard that this one exchanges partial sums with"
    return ""


def _contribution_problem(options: SyncOptions, message: Push | Empty) -> str:
    """The step behind the last one is no error: a trainer may not know the end yet, and is told."""
    if not 0 <= message.slot < options.slots:
        return f"there is no slot {message.slot}"
    if not 0 <= message.step <= options.total_steps:
        return f"there is no step {message.step}: the job has {options.total_steps}"
    if isinstance(message, Push) and message.samples < 1:
        return f"a push has {message.samples} samples"
    if isinstance(message, Push):
        return _outcome_problem(options, message)
    return ""


def _outcome_problem(options: SyncOptions | AsyncOptions, message: Push | BatchPush) -> str:
    """Checks what a contribution's last bucket says of it as a whole."""
    if len(message.values) not in (0, options.values):
        return f"a push reports {len(message.values)} values, expected {options.values}"
    return "" if message.finite or options.skips else "a contribution that is not finite: this job leaves none out"


def async_problem(options: AsyncOptions, message: Message, payload: Any) -> str:
    """For an async shard."""
    if problem := _frame_problem(message, payload):
        return problem
    if isinstance(message, BatchPush | Pull) and message.bucket not in options.buckets:
        return f"this shard has no bucket {message.bucket}"
    if isinstance(message, BatchPush | LedgerQuery) and not (
        0 <= message.pass_index < options.passes and 0 <= message.chunk < len(options.batches)
    ):
        return f"there is no chunk {message.chunk} of pass {message.pass_index}"
    if not isinstance(message, BatchPush):
        return ""
    if message.batches != options.batches[message.chunk]:
        return f"chunk {message.chunk} has {options.batches[message.chunk]} batches, not {message.batches}"
    if not 0 <= message.batch < message.batches or message.samples < 1:
        return f"batch {message.batch} of {message.batches} with {message.samples} samples"
    return _outcome_problem(options, message)


def _frame_problem(message: Message, payload: Any) -> str:
    if isinstance(message, WITH_A_FRAME):
        return f"{type(message).__name__} without a frame" if payload is None else ""
    return "" if payload is None or isinstance(message, Partials) else f"no frame belongs to {type(message).__name__}"


# -- answers, at a trainer --------------------------------------------------------------------------------------------


def sync_answer_problem(options: TrainerOptions, shard: int, message: Message, payload: Any) -> str:
    """For what a shard tells a sync trainer."""
    if problem := _answer_problem(options.buckets[shard], message, payload):
        return problem
    if isinstance(message, Welcome | Refused | Parameters) and message.version > options.total_steps:
        return f"version {message.version}, but the job has {options.total_steps} steps"
    return ""


def async_answer_problem(options: AsyncTrainerOptions, shard: int, message: Message, payload: Any) -> str:
    """For what a shard tells an async trainer."""
    if problem := _answer_problem(options.buckets[shard], message, payload):
        return problem
    if isinstance(message, Ledger):
        edges = [edge for pair in message.ranges for edge in pair]
        if any(a >= b for a, b in pairwise([-1, *edges])):
            return "the ranges of a ledger are not in order"
    return ""


def _answer_problem(buckets: tuple[int, ...], message: Message, payload: Any) -> str:
    if problem := _frame_problem(message, payload):
        return problem
    if isinstance(message, Parameters) and message.bucket not in buckets:
        return f"it has no bucket {message.bucket}"
    if isinstance(message, Refused):
        known = message.code in CODES and min(message.generation, message.version) >= -1
        return "" if known else f"a refusal with code {message.code[:40]!r} at version {message.version}"
    if isinstance(message, Welcome | Parameters) and message.generation < 0:
        return f"generation {message.generation}"
    if isinstance(message, Welcome | Parameters | BatchAck) and message.version < 0:
        return f"version {message.version}"
    return ""
