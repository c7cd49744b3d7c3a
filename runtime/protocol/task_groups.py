"""How the coordinator's tasks lie in etcd: one record for each group of tasks that is no longer untouched.

    /<job>.tasks/<pass>/<group> = TaskGroup

A change of some tasks rewrites their groups, so that nothing grows with the number of tasks (the old way, one value for
the whole queue, met etcd's limit of 1.5 MB). A pass of which nothing is begun has no records.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from graphft.runtime.protocol.chunk_queue import Todo

GROUP = 256
"""Tasks of a group: those whose chunk numbers are the same when divided by it. About 2 KB when all are pending."""


@dataclass(slots=True)
class Task:
    """A task that is begun and not done. `holder`: the trainer; "": none, it is to do. `attempt`: a number that no
    other attempt of the job has. `call`: of its holder, by which it was given. `renewed`: when its holder was heard
    of."""

    todo: Todo
    holder: str = ""
    slot: int = -1
    attempt: int = 0
    call: int = 0
    renewed: float = 0.0


class TaskCounts(msgspec.Struct, frozen=True):
    """The numbers of a pass's tasks in each state; in `/<job>.tasks/counts`, by pass."""

    todo: int
    pending: int
    done: int


class QueueState(msgspec.Struct, frozen=True):
    """The value of `/<job>.tasks/state`. Attempts below `attempts` may have been given out; `closed`: the job's last
    step is applied, nothing is given out any more. `generation`: sync, the newest that a slot was asked for in.
    `complete`: so is the job, when no trainer is left, and the model is saved."""

    attempts: int = 1
    closed: bool = False
    generation: int = 0
    complete: bool = False


class ModelSaver(msgspec.Struct, frozen=True):
    """The value of `/<job>.tasks/model_saver`. `until`: Unix seconds, on the coordinator's clock."""

    trainer: str
    until: float


class TaskRun(msgspec.Struct, frozen=True, array_like=True):
    """`numbers`: in the group. `attempts`: counted from `attempt`."""

    holder: str
    slot: int
    call: int
    todo: tuple[int, int, int, bool, tuple[int, ...]]
    attempt: int
    numbers: list[int]
    attempts: list[int]


class TaskGroup(msgspec.Struct, frozen=True, array_like=True):
    """`done`: a bit for each task. `open`: those that are begun: tasks that differ in nothing else than their number in
    the group and their attempt are told of together."""

    done: bytes
    open: list[TaskRun]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TaskGroup)


def group_of(chunk: int) -> int:
    return chunk // GROUP


def encode_group(done: bytes, tasks: dict[int, Task]) -> bytes:
    """`done`: a byte for each task of the group, 1 if it is. `tasks`: those that are begun, by chunk."""
    runs: dict[tuple[str, int, int, Todo], list[tuple[int, Task]]] = {}
    for chunk, task in tasks.items():
        runs.setdefault((task.holder, task.slot, task.call, task.todo), []).append((chunk % GROUP, task))
    return _encoder.encode(TaskGroup(_pack(done), [_run(run) for run in runs.values()]))


def _run(tasks: list[tuple[int, Task]]) -> TaskRun:
    first, attempts = tasks[0][1], [task.attempt for _, task in tasks]
    todo, least = first.todo, min(attempts)
    return TaskRun(
        first.holder,
        first.slot,
        first.call,
        (todo.attempt, todo.failures, todo.progress, todo.open, todo.suspects),
        least,
        [number for number, _ in tasks],
        [attempt - least for attempt in attempts],
    )


def decode_group(value: bytes, group: int) -> tuple[bytes, dict[int, Task]]:
    """A byte for each of the group's tasks, 1 if it is done; and those that are begun. Raises msgspec.DecodeError."""
    found = _decoder.decode(value)
    tasks: dict[int, Task] = {}
    for run in found.open:
        todo = Todo(*run.todo)
        for number, attempt in zip(run.numbers, run.attempts, strict=True):
            tasks[group * GROUP + number] = Task(todo, run.holder, run.slot, run.attempt + attempt, run.call)
    return _unpack(found.done), tasks


def _pack(flags: bytes) -> bytes:
    """Eight to a byte, without the zeros behind the last one."""
    value = int(flags[::-1].translate(_DIGITS).decode() or "0", 2)
    return value.to_bytes((value.bit_length() + 7) // 8, "little")


def _unpack(bits: bytes) -> bytes:
    value = int.from_bytes(bits, "little")
    digits = f"{value:b}"[::-1].encode() if value else b""
    return digits.translate(_NUMBERS).ljust(GROUP, b"\0")


_DIGITS = bytes.maketrans(b"\0\1", b"01")
_NUMBERS = bytes.maketrans(b"01", b"\0\1")
