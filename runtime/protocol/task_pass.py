"""How the coordinator's tasks lie in etcd: one record for each group of tasks that is no longer untouched.

    /<job>.tasks/<pass>/<group> = TaskGroup

A change of some tasks rewrites their groups, so that nothing grows with the number of tasks (the old way, one value for
the whole queue, met etcd's limit of 1.5 MB). A pass of which nothing is begun has no records.


The tasks of one pass, in the coordinator's memory: todo, pending, done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from graphft.plan import permutation
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


_FIRST = Todo().claimed()
_GROUPS, _TASKS = 7, 8
"""Of keys of permutations: these orders are no others."""


class PassTasks:
    """One pass. `exists`: a byte for each chunk, 1 if it has a batch: those are its tasks.

    Tasks are given out group by group, in an order that is a function of the job's seed and the pass, and those of a
    group in such an order, too: so few groups change at a time. What came back is given out after the others.
    """

    def __init__(self, index: int, exists: bytes, seed: int, *, done: bool = False) -> None:
        self.index, self.exists, self.seed = index, exists, seed
        self.count = exists.count(1)
        self.done = bytearray(exists if done else len(exists))
        self.finished = self.count if done else 0
        self.open: dict[int, Task] = {}
        """Begun, and not done."""
        self.pending = 0
        self.back: deque[int] = deque()
        """Begun tasks that no trainer holds, in the order in which they came back."""
        self.touched: set[int] = set()
        """Groups that have changed since they were saved."""
        self._order = self._in_order() if not done else iter(())

    # -- counts -------------------------------------------------------------------------------------------------

    @property
    def todo(self) -> int:
        return self.count - self.finished - self.pending

    @property
    def over(self) -> bool:
        return self.finished == self.count

    # -- transitions --------------------------------------------------------------------------------------------

    def next_free(self) -> int | None:
        """A task to give out; None: there is none. What it returns is to be given, or put `back`."""
        for chunk in self._order:
            if not self.done[chunk] and chunk not in self.open:
                return chunk
        while self.back:
            chunk = self.back.popleft()
            task = self.open.get(chunk)
            if task is not None and not task.holder:
                return chunk
        return None

    def give(self, chunk: int, holder: str, slot: int, attempt: int, call: int, now: float, *, vanished: bool) -> Task:
        """Todo -> pending, whoever holds it. `vanished`: a holder before who did has failed at it."""
        task = self.open.get(chunk)
        if task is None:
            if self.done[chunk]:
                self._undone(chunk)
            todo = _FIRST
        else:
            self.pending -= bool(task.holder)
            todo = task.todo.claimed(task.todo.progress, vanished)
        self.open[chunk] = task = Task(todo, holder, slot, attempt, call, now)
        self.pending += 1
        self.touched.add(group_of(chunk))
        return task

    def finish(self, chunk: int) -> None:
        """Pending -> done."""
        task = self.open.pop(chunk, None)
        self.pending -= bool(task is not None and task.holder)
        if not self.done[chunk]:
            self.done[chunk] = 1
            self.finished += 1
        self.touched.add(group_of(chunk))

    def put_back(self, chunk: int, todo: Todo) -> None:
        """Pending or done -> todo."""
        task = self.open.get(chunk)
        if task is None:
            self._undone(chunk)
        else:
            self.pending -= bool(task.holder)
        self.open[chunk] = Task(todo)
        self.back.append(chunk)
        self.touched.add(group_of(chunk))

    def note(self, chunk: int, todo: Todo, now: float) -> None:
        """Its holder was heard of."""
        task = self.open[chunk]
        task.renewed = now
        if todo != task.todo:
            task.todo = todo
            self.touched.add(group_of(chunk))

    def _undone(self, chunk: int) -> None:
        if self.done[chunk]:
            self.done[chunk] = 0
            self.finished -= 1

    # -- in etcd ------------------------------------------------------------------------------------------------

    def saved(self, group: int) -> bytes:
        """The group's record."""
        chunks = range(group * GROUP, min((group + 1) * GROUP, len(self.exists)))
        tasks = {chunk: task for chunk in chunks if (task := self.open.get(chunk)) is not None}
        return encode_group(bytes(self.done[chunks.start : chunks.stop]), tasks)

    def load(self, records: Mapping[int, bytes], now: float) -> None:
        """Takes in the records that were saved, by group. Raises msgspec.DecodeError."""
        for group, value in records.items():
            done, tasks = decode_group(value, group)
            start, end = group * GROUP, min((group + 1) * GROUP, len(self.exists))
            self.finished += done[: end - start].count(1) - self.done[start:end].count(1)
            self.done[start:end] = done[: end - start]
            for chunk, task in tasks.items():
                task.renewed = now
                self.open[chunk] = task
                self.pending += bool(task.holder)
                if not task.holder:
                    self.back.append(chunk)

    # -- order --------------------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[int]:
        """All tasks, as they are given out if none comes back."""
        groups = -(-len(self.exists) // GROUP)
        for group in permutation(groups, _GROUPS, self.seed, self.index).tolist():
            chunks = range(group * GROUP, min((group + 1) * GROUP, len(self.exists)))
            if self.done[chunks.start : chunks.stop] == self.exists[chunks.start : chunks.stop]:
                continue  # of a pass that was loaded
            for at in permutation(len(chunks), _TASKS, self.seed, self.index, group).tolist():
                if self.exists[chunks[at]]:
                    yield chunks[at]

    def check(self) -> Iterable[str]:
        """Yields what is wrong with it; nothing, ever. For tests."""
        held = sum(1 for task in self.open.values() if task.holder)
        if held != self.pending:
            yield f"{held} tasks are held, {self.pending} are counted"
        if self.finished != self.done.count(1):
            yield f"{self.done.count(1)} tasks are done, {self.finished} are counted"
        if both := [chunk for chunk in self.open if self.done[chunk]]:
            yield f"tasks {both} are begun and done"
        if lost := [chunk for chunk, task in self.open.items() if not task.holder and chunk not in self.back]:
            yield f"tasks {lost} are free, and will not be given out"
