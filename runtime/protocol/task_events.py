"""What the coordinator's task queues are told, and what they decide: see `task_queue`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from graphft.plan import Plan
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
    """`timeout`: seconds without a word of its holder, and a task is taken from it. `max_lost`: holders in a row that
    may vanish at a task (async)."""

    plan: Plan
    sync: bool
    shards: int
    timeout: float = math.inf
    max_lost: float = math.inf


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A call came. `wall`: Unix seconds."""

    peer: bytes
    call: TASK_CALLS
    wall: float = 0.0


@dataclass(frozen=True, slots=True)
class Fenced:
    """This call came, but one of its fences does not hold."""

    peer: bytes
    call: FinishTasks | GetTasks


@dataclass(frozen=True, slots=True)
class Living:
    """These trainers are registered now."""

    trainers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """To be sent when what has changed is saved. `fences`: what must hold in etcd at that moment: (kind, number,
    revision): that the record of shard `number`'s generation, or of the claim of slot `number`, has this revision. If
    one does not, nothing of the call may be saved."""

    peer: bytes
    message: TASK_ANSWERS
    fences: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TookAway:
    """A task was taken from its holder, who was not heard of for `age` seconds."""

    pass_index: int
    chunk: int
    trainer: str
    slot: int
    age: float


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Too many holders have vanished at this task: what is left of it is to be discarded (`put` says what became)."""

    pass_index: int
    chunk: int


Effect = Answer | TookAway | Hopeless


@dataclass(slots=True)
class Changes:
    """Changes to be saved. `groups`: (pass, group) of tasks; `marker`: the pass that is worked on, if that changes;
    `saver`: if that changes; `over`: passes whose records are not needed any more."""

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


MAX_REVISION = 2**63
"""etcd's numbers are smaller."""
MAX_SECONDS = 24 * 3600.0
"""For which a trainer may be elected to save the model."""


def task_problem(options: QueueOptions, exists: bytes, call: TASK_CALLS) -> str:
    """Returns what is wrong with a call whatever the state is; "": nothing."""
    if isinstance(call, GetTasks):
        return _problem_of_get(options, exists, call)
    if isinstance(call, RenewTasks):
        return _no_task(options.plan, exists, ((p, chunk, applied) for p, chunk, _, applied in call.tasks))
    if isinstance(call, FinishTasks):
        if len(call.fences) not in (0, options.shards):
            return f"{len(call.fences)} fences of {options.shards} shards"
        if strange := [fence for fence in call.fences if abs(fence) >= MAX_REVISION]:
            return f"{strange[0]} is no revision"
        return _no_task(options.plan, exists, ((call.pass_index, chunk, 0) for chunk, _ in call.tasks))
    if isinstance(call, ReleaseTasks):
        return _no_task(options.plan, exists, ((call.pass_index, chunk, applied) for chunk, _, applied in call.tasks))
    if isinstance(call, RequeueTasks):
        return _no_task(options.plan, exists, ((call.pass_index, chunk, applied) for chunk, applied in call.tasks))
    if isinstance(call, FailTask):
        return _problem_of_failure(options.plan, exists, call)
    if isinstance(call, RequestSaveModel) and not 0 < call.seconds <= MAX_SECONDS:
        return f"nobody saves a model for {call.seconds} s"
    return ""


def _problem_of_get(options: QueueOptions, exists: bytes, call: GetTasks) -> str:
    if not options.sync:
        return "no trainer chooses its tasks in async mode" if call.chunks or call.slot >= 0 else ""
    if not (0 <= call.slot < options.plan.slots):
        return f"there is no slot {call.slot}"
    if not 0 <= call.pass_index < options.plan.passes:
        return f"there is no pass {call.pass_index}"
    if strange := [n for n in (call.holds, call.generation, call.lowest) if abs(n) >= MAX_REVISION]:
        return f"{strange[0]} is no revision, generation or version"
    return _no_task(options.plan, exists, ((call.pass_index, chunk, 0) for chunk in call.chunks))


def _problem_of_failure(plan: Plan, exists: bytes, call: FailTask) -> str:
    if problem := _no_task(plan, exists, [(call.pass_index, call.chunk, 0)]):
        return problem
    if not 0 <= call.batch < plan.batches[call.chunk]:
        return f"task {call.chunk} has no batch {call.batch}"
    if strange := [record for record in call.records if not 0 <= record < plan.lengths[call.chunk]]:
        return f"task {call.chunk} has no record {strange[0]}"
    return ""


def _no_task(plan: Plan, exists: bytes, found: Iterable[tuple[int, int, int]]) -> str:
    """Which of these (pass, chunk, batches applied) there cannot be."""
    size = len(exists)
    for index, chunk, applied in found:
        if not (0 <= index < plan.passes and 0 <= chunk < size and exists[chunk]):
            return f"there is no task {chunk} in pass {index}"
        if applied and not 0 <= applied <= plan.batches[chunk]:
            return f"task {chunk} does not have {applied} batches"
    return ""
