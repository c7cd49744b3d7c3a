"""What the coordinator's task queues are told, and what they decide: see `task_queue`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphft.plan import Plan
from graphft.runtime.protocol.messages import TASK_ANSWERS, TASK_CALLS, FinishTasks, GetTasks
from graphft.runtime.protocol.task_groups import ModelSaver, QueueState, TaskCounts


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
    """These trainers are registered now. `come`: those of them that registered after what the queue has loaded was
    saved."""

    trainers: frozenset[str]
    come: frozenset[str] = frozenset()


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
    """What is to be saved. `groups`: (pass, group) of tasks; `marker`: the pass that is worked on, if that changes;
    `saver`: if that changes; `over`: passes whose records are not needed any more."""

    groups: list[tuple[int, int]]
    counts: dict[str, TaskCounts]
    state: QueueState
    marker: int | None
    saver: ModelSaver | None
    over: list[int]


def fences_of(call: TASK_CALLS) -> tuple[tuple[str, int, int], ...]:
    """What must hold in etcd when what this call changes is saved: see `Answer`."""
    if isinstance(call, GetTasks) and call.slot >= 0:
        return (("slot", call.slot, call.holds),)
    if isinstance(call, FinishTasks):
        return tuple(("shard", shard, revision) for shard, revision in enumerate(call.fences))
    return ()
