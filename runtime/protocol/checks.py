"""What is wrong with a message whatever the receiver's state is: compared with the program alone, before anything looks
at it. Each function returns a text for the refusal, "" if nothing is wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from graphft.runtime.protocol.messages import (
    CODES,
    BatchAck,
    BatchPush,
    Empty,
    Ledger,
    LedgerQuery,
    Message,
    Parameters,
    Partials,
    PartialsQuery,
    Pull,
    Push,
    Refused,
    Welcome,
)

if TYPE_CHECKING:
    from graphft.runtime.protocol.async_events import AsyncTrainerOptions
    from graphft.runtime.protocol.async_shard import AsyncOptions
    from graphft.runtime.protocol.sync_events import SyncOptions, TrainerOptions

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
