"""The tasks of one pass, in the coordinator's memory: todo, pending, done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from graphft.plan import permutation
from graphft.runtime.protocol.chunk_queue import Todo
from graphft.runtime.protocol.task_groups import GROUP, Task, decode_group, encode_group, group_of

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
