"""Events and effects of the coordinator's task queues, and what is wrong with a call: see `task_queue`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from graphft.plan import Plan
from graphft.runtime.protocol.machine import Effect, Event
from graphft.runtime.protocol.messages import (
    TASK_ANSWERS,
    TASK_CALLS,
    FailTask,
    FinishTasks,
    GetTasks,
    ReleaseTasks,
    RenewTasks,
    RequestSaveModel,
    RequeueTasks,
)
from graphft.runtime.protocol.task_pass import ModelSaver, QueueState, TaskCounts


@dataclass(slots=True)
class QueueOptions:
    """`timeout`: seconds after which a task is taken from a holder that was not heard of. `max_lost`: async, holders in
    a row that may vanish at a task."""

    plan: Plan
    sync: bool
    shards: int
    timeout: float = math.inf
    max_lost: float = math.inf


# -- events -----------------------------------------------------------------------------------------------------------


class Asked(Event, frozen=True):
    """A call came. `wall`: Unix seconds."""

    peer: bytes
    call: TASK_CALLS
    wall: float = 0.0


class Fenced(Event, frozen=True):
    """This call came, but one of its fences does not hold."""

    peer: bytes
    call: FinishTasks | GetTasks


class Living(Event, frozen=True):
    """These trainers are registered now."""

    trainers: frozenset[str]


# -- effects ----------------------------------------------------------------------------------------------------------


class Answer(Effect, frozen=True):
    """To be sent when the changes are saved. `fences`: (kind, number, revision): the record of shard `number`'s
    generation, or of the claim of slot `number`, must have this revision then, or nothing of the call is saved."""

    peer: bytes
    message: TASK_ANSWERS
    fences: tuple[tuple[str, int, int], ...] = ()


class TookAway(Effect, frozen=True):
    """A task was taken from its holder, who was not heard of for `age` seconds."""

    pass_index: int
    chunk: int
    trainer: str
    slot: int
    age: float


class Hopeless(Effect, frozen=True):
    """Too many holders have vanished at this task: the rest of it is to be discarded, and the task `put`."""

    pass_index: int
    chunk: int


@dataclass(slots=True)
class Changes:
    """To be saved. `groups`: (pass, group). `marker`: the pass that is worked on, if that changes. `saver`: if that
    changes. `over`: passes whose records are not needed any more."""

    groups: list[tuple[int, int]]
    counts: dict[str, TaskCounts]
    state: QueueState
    marker: int | None
    saver: ModelSaver | None
    over: list[int]


def fences_of(call: TASK_CALLS) -> tuple[tuple[str, int, int], ...]:
    """Returns what must hold in etcd when the changes of this call are saved: see `Answer`."""
    if isinstance(call, GetTasks) and call.slot >= 0:
        return (("slot", call.slot, call.holds),)
    if isinstance(call, FinishTasks):
        return tuple(("shard", shard, revision) for shard, revision in enumerate(call.fences))
    return ()


MAX_SECONDS = 24 * 3600.0
"""The longest time for which a trainer is elected to save the model."""


def task_problem(options: QueueOptions, exists: bytes, call: TASK_CALLS) -> str:
    """Returns what is wrong with a call whatever the state is; "": nothing."""
    plan = options.plan
    if isinstance(call, GetTasks) and not options.sync:
        return "no trainer chooses its tasks in async mode" if call.chunks or call.slot >= 0 else ""
    if isinstance(call, GetTasks) and not 0 <= call.slot < plan.slots:
        return f"there is no slot {call.slot}"
    if isinstance(call, GetTasks) and not 0 <= call.pass_index < plan.passes:
        return f"there is no pass {call.pass_index}"
    if isinstance(call, FinishTasks) and len(call.fences) not in (0, options.shards):
        return f"{len(call.fences)} fences of {options.shards} shards"
    if isinstance(call, RequestSaveModel) and not 0 < call.seconds <= MAX_SECONDS:
        return f"nobody saves a model for {call.seconds} s"
    for index, chunk, applied in _tasks_of(call):
        if not (0 <= index < plan.passes and 0 <= chunk < len(exists) and exists[chunk]):
            return f"there is no task {chunk} in pass {index}"
        if not 0 <= applied <= plan.batches[chunk]:
            return f"task {chunk} does not have {applied} batches"
    if isinstance(call, FailTask) and call.batch == plan.batches[call.chunk]:
        return f"task {call.chunk} has no batch {call.batch}"
    if isinstance(call, FailTask) and (bad := [r for r in call.records if not 0 <= r < plan.lengths[call.chunk]]):
        return f"task {call.chunk} has no record {bad[0]}"
    return ""


def _tasks_of(call: TASK_CALLS) -> Iterable[tuple[int, int, int]]:
    """Returns the tasks that a call names: (pass, chunk, batches)."""
    if isinstance(call, RenewTasks):
        return [(index, chunk, applied) for index, chunk, _, applied in call.tasks]
    if isinstance(call, GetTasks):
        return [(call.pass_index, chunk, 0) for chunk in call.chunks]
    if isinstance(call, FinishTasks):
        return [(call.pass_index, chunk, 0) for chunk, _ in call.tasks]
    if isinstance(call, ReleaseTasks):
        return [(call.pass_index, chunk, applied) for chunk, _, applied in call.tasks]
    if isinstance(call, RequeueTasks):
        return [(call.pass_index, chunk, applied) for chunk, applied in call.tasks]
    return [(call.pass_index, call.chunk, call.batch)] if isinstance(call, FailTask) else []
