"""The tasks of one pass, in the coordinator's memory and in etcd.

    /<job>.tasks/<pass>/<group> = TaskGroup

A group has a record when one of its tasks was begun. A change of some tasks rewrites their groups, so that no record
grows with the number of tasks.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping

import msgspec

from graphft.plan import permutation
from graphft.runtime.protocol.chunk_queue import Todo

GROUP = 256
"""Tasks of a group, whose chunk numbers are the same when divided by it."""
_FIRST = Todo().claimed()
_GROUPS, _TASKS = 7, 8
"""Keys of permutations, unlike those of others."""


class Task(msgspec.Struct, array_like=True):
    """A task that is begun and not done. `holder`: a trainer; "": the task is to do. `attempt`: a number that no other
    attempt of the job has. `call`: that of its holder that got it. `renewed`: when its holder was last heard of."""

    todo: Todo
    holder: str = ""
    slot: int = -1
    attempt: int = 0
    call: int = 0
    renewed: float = 0.0


class TaskCounts(msgspec.Struct, frozen=True):
    """The numbers of a pass's tasks by state; in `/<job>.tasks/counts`, by pass."""

    todo: int
    pending: int
    done: int


class QueueState(msgspec.Struct, frozen=True):
    """The value of `/<job>.tasks/state`. Attempts below `attempts` may have been given out. `closed`: the last step is
    applied, nothing is given out any more. `generation`: sync, the newest that a slot was asked for in. `complete`: so
    is the job, when no trainer is left and the model is saved."""

    attempts: int = 1
    closed: bool = False
    generation: int = 0
    complete: bool = False


class ModelSaver(msgspec.Struct, frozen=True):
    """The value of `/<job>.tasks/model_saver`. `until`: Unix seconds, on the coordinator's clock."""

    trainer: str
    until: float


class TaskGroup(msgspec.Struct, frozen=True, array_like=True):
    """`done`: a byte for each task, 1 if it is done. `open`: the tasks that are begun, by chunk."""

    done: bytes
    open: dict[int, Task]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TaskGroup)


def group_of(chunk: int) -> int:
    return chunk // GROUP


def encode_group(group: TaskGroup) -> bytes:
    return zlib.compress(_encoder.encode(group), 1)


def decode_group(value: bytes) -> TaskGroup:
    """Raises ValueError."""
    try:
        return _decoder.decode(zlib.decompress(value))
    except (zlib.error, msgspec.DecodeError) as error:
        raise ValueError(str(error)) from None


class PassTasks:
    """One pass. `exists`: a byte for each chunk, 1 if it has a batch: those are its tasks.

    Tasks are given out group by group, in orders that are functions of the job's seed and the pass, so that few groups
    change at a time. What came back is given out after the others.
    """

    def __init__(self, index: int, exists: bytes, seed: int, *, done: bool = False) -> None:
        self.index, self.exists, self.seed = index, exists, seed
        self.count = exists.count(1)
        self.done = bytearray(exists if done else len(exists))
        self.finished = self.count if done else 0
        self.open: dict[int, Task] = {}
        self.pending = 0
        self.back: deque[int] = deque()
        """Begun tasks without a holder, in the order in which they came back."""
        self.touched: set[int] = set()
        """Groups that have changed since they were saved."""
        self._order = self._in_order() if not done else iter(())

    @property
    def todo(self) -> int:
        return self.count - self.finished - self.pending

    @property
    def over(self) -> bool:
        return self.finished == self.count

    def held(self, trainers: Collection[str] = ()) -> list[tuple[int, Task]]:
        """Returns the tasks that these trainers hold (none named: any trainer)."""
        return [(c, t) for c, t in self.open.items() if t.holder and (not trainers or t.holder in trainers)]

    # -- transitions --------------------------------------------------------------------------------------------

    def next_free(self) -> int | None:
        """Returns a task to give out, which is to be given or put `back`; None: there is none."""
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
        """Todo -> pending, whoever holds it. `vanished`: counts a failure if the holder before has vanished."""
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
        """Notes that the holder was heard of."""
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
        """Returns the group's record."""
        chunks = self._chunks(group)
        tasks = {chunk: task for chunk in chunks if (task := self.open.get(chunk)) is not None}
        return encode_group(TaskGroup(bytes(self.done[chunks.start : chunks.stop]), tasks))

    def load(self, records: Mapping[int, bytes], now: float) -> None:
        """Takes in the records that were saved, by group. Raises ValueError."""
        for group, value in records.items():
            found, chunks = decode_group(value), self._chunks(group)
            if len(found.done) != len(chunks) or not found.open.keys() <= set(chunks):
                raise ValueError(f"group {group} of pass {self.index} has other tasks")
            self.finished += found.done.count(1) - self.done[chunks.start : chunks.stop].count(1)
            self.done[chunks.start : chunks.stop] = found.done
            for chunk, task in found.open.items():
                task.renewed = now
                self.open[chunk] = task
                self.pending += bool(task.holder)
                if not task.holder:
                    self.back.append(chunk)

    def _chunks(self, group: int) -> range:
        return range(group * GROUP, min((group + 1) * GROUP, len(self.exists)))

    # -- order --------------------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[int]:
        """Yields all tasks, as they are given out if none comes back."""
        groups = -(-len(self.exists) // GROUP)
        for group in permutation(groups, _GROUPS, self.seed, self.index).tolist():
            chunks = self._chunks(group)
            if self.done[chunks.start : chunks.stop] == self.exists[chunks.start : chunks.stop]:
                continue  # of a pass that was loaded
            for at in permutation(len(chunks), _TASKS, self.seed, self.index, group).tolist():
                if self.exists[chunks[at]]:
                    yield chunks[at]

    def invariants(self) -> dict[str, bool]:
        return {
            "those that are held are counted": self.pending == len(self.held()),
            "those that are done are counted": self.finished == self.done.count(1),
            "none is begun and done": not any(self.done[chunk] for chunk in self.open),
            "free ones are given out": all(t.holder or chunk in self.back for chunk, t in self.open.items()),
        }
