"""The coordinator's queues under test: fed call by call; what survives of them lies in a dictionary, as in etcd."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphft.plan import Plan
from graphft.runtime.protocol.events import Tick
from graphft.runtime.protocol.messages import (
    CloseTasks,
    FinishTasks,
    GetTasks,
    ReleaseTasks,
    RenewTasks,
    RequestSaveModel,
    RequeueTasks,
    SaveModelAnswer,
    Tasks,
    TasksRefused,
    TasksSettled,
)
from graphft.runtime.protocol.task_events import Answer, Asked, Fenced, Hopeless, Living, QueueOptions
from graphft.runtime.protocol.task_pass import ModelSaver, QueueState, TaskCounts
from graphft.runtime.protocol.task_queue import TaskQueue

SMALL = Plan([8, 8, 8, 8], slots=2, batch_size=2, seed=3, passes=3)
"""Tasks 0 to 3, of four batches each."""
WIDE = Plan([8 if chunk % 100 == 0 else 0 for chunk in range(600)], slots=1, batch_size=2, seed=3, passes=2)
"""Tasks 0, 100, ..., 500, in three groups."""


@dataclass
class Saved:
    """The changes that the driver has written."""

    groups: dict[tuple[int, int], bytes] = field(default_factory=dict)
    counts: dict[str, TaskCounts] | None = None
    state: QueueState = field(default_factory=QueueState)
    marker: int = -1
    saver: ModelSaver | None = None

    def write(self, machine: TaskQueue, parts: int | None = None) -> bool:
        """As `TaskStore.save`, with one group in each transaction: numbers of attempts with the first, counts with the
        last one. `parts`: so many groups are written before the process dies."""
        changes = machine.take_changes()
        if changes is None:
            return True
        for n, (index, group) in enumerate(changes.groups):
            if n == parts:
                return False
            self.state = changes.state
            self.groups[index, group] = machine.passes[index].saved(group)
        if parts is not None:
            return False
        self.counts, self.state = changes.counts, changes.state
        self.groups = {key: value for key, value in self.groups.items() if key[0] not in changes.over}
        self.saver = changes.saver or self.saver
        self.marker = self.marker if changes.marker is None else changes.marker
        return True

    def load(self, options: QueueOptions, now: float) -> TaskQueue:
        machine = TaskQueue(options)
        if self.counts is None:
            machine.begin(self.state)
            return machine
        groups: dict[int, dict[int, bytes]] = {}
        for (index, group), value in self.groups.items():
            groups.setdefault(index, {})[group] = value
        machine.load(self.marker, self.counts, groups, self.state, self.saver, now)
        return machine


def durable(machine: TaskQueue) -> Any:
    """All that its successor has to know."""
    passes = {
        index: (bytes(tasks.done), {c: (t.todo, t.holder, t.slot, t.attempt, t.call) for c, t in tasks.open.items()})
        for index, tasks in machine.passes.items()
        if not tasks.over
    }
    over = sorted({*range(machine.begun + 1)} - passes.keys())
    return passes, over, machine.current, machine.attempts, machine.saver, machine.closed


class TaskRig:
    """A coordinator that saves after each event, and trainers "a", "b" and "c". `check` runs after each event, too, and
    what a successor would load is compared with what this one knows."""

    def __init__(self, plan: Plan = SMALL, *, sync: bool = False, shards: int = 2, living: str = "abc") -> None:
        self.options = QueueOptions(plan, sync, shards, timeout=60.0, max_lost=3)
        self.saved, self.now, self.wall = Saved(), 100.0, 5000.0
        self.machine = self.saved.load(self.options, self.now)
        self.numbers = dict.fromkeys("abc", 0)
        self.hopeless: list[tuple[int, int]] = []
        self.fences: tuple[tuple[str, int, int], ...] = ()
        """The number of the last answer."""
        self.live(living)

    # -- events -------------------------------------------------------------------------------------------------

    def feed(self, event: Asked | Fenced | Living | Tick) -> list[Any]:
        effects = self.machine.step(event, self.now)
        for effect in effects:
            if isinstance(effect, Hopeless):  # the driver writes what is discarded, and puts the rest back
                todo = self.machine.passes[effect.pass_index].open[effect.chunk].todo
                self.machine.put(effect.pass_index, effect.chunk, todo.discarded(todo.progress))
                self.hopeless.append((effect.pass_index, effect.chunk))
        self.machine.check_invariants()
        assert self.saved.write(self.machine)
        assert durable(self.saved.load(self.options, self.now)) == durable(self.machine)
        return effects

    def live(self, trainers: str) -> None:
        self.feed(Living(frozenset(trainers)))

    def pass_time(self, seconds: float) -> list[Any]:
        self.now += seconds
        self.wall += seconds
        return self.feed(Tick())

    def crash(self) -> None:
        """Another coordinator takes over."""
        living = self.machine.living
        self.machine = self.saved.load(self.options, self.now)
        self.feed(Living(living))

    def ask(self, call: Any) -> Any:
        """The answer, None if there is none."""
        answers = [e for e in self.feed(Asked(b"peer", call, self.wall)) if isinstance(e, Answer)]
        assert len(answers) <= 1
        self.fences = answers[0].fences if answers else ()
        return answers[0].message if answers else None

    # -- calls --------------------------------------------------------------------------------------------------

    def number(self, trainer: str) -> int:
        self.numbers[trainer] += 1
        return self.numbers[trainer]

    def get(self, trainer: str, want: int = 1, pass_index: int | None = None) -> dict[int, int]:
        """Attempts by chunk."""
        asked = self.machine.current if pass_index is None else pass_index
        found = self.ask(GetTasks(self.number(trainer), trainer, asked, want))
        assert isinstance(found, Tasks), found
        return dict(found.tasks)

    def get_slot(
        self, trainer: str, slot: int, chunks: list[int], pass_index: int = 0, *, generation: int = 0, lowest: int = 0
    ) -> dict[int, int]:
        number = self.number(trainer)
        call = GetTasks(number, trainer, pass_index, 0, slot, 7 + slot, chunks, generation, lowest)
        found = self.ask(call)
        assert isinstance(found, Tasks), found
        return dict(found.tasks)

    def finish(self, trainer: str, tasks: dict[int, int], pass_index: int = 0, fences: tuple[int, ...] = ()) -> Any:
        """Chunks that are refused."""
        return self.settled(FinishTasks(self.number(trainer), trainer, pass_index, [*tasks.items()], [*fences]))

    def release(self, trainer: str, tasks: dict[int, int], pass_index: int = 0, applied: int = 0) -> Any:
        found = [(chunk, attempt, applied) for chunk, attempt in tasks.items()]
        return self.settled(ReleaseTasks(self.number(trainer), trainer, pass_index, found))

    def renew(
        self, trainer: str, tasks: dict[int, int], pass_index: int = 0, applied: int = 0, known: int = -1
    ) -> None:
        found = [(pass_index, chunk, attempt, applied) for chunk, attempt in tasks.items()]
        assert self.ask(RenewTasks(self.numbers[trainer] if known < 0 else known, trainer, found)) is None

    def requeue(self, tasks: dict[int, int], pass_index: int = 0) -> Any:
        return self.settled(RequeueTasks(1, "shard", pass_index, [*tasks.items()]))

    def close(self) -> Any:
        return self.settled(CloseTasks(1, "shard"))

    def settled(self, call: Any) -> list[int]:
        found = self.ask(call)
        assert isinstance(found, TasksSettled), found
        return found.refused

    def refused(self, call: Any) -> str:
        """The code."""
        before = durable(self.machine)
        found = self.ask(call)
        assert isinstance(found, TasksRefused), found
        assert (found.call, self.fences) == (call.call, ())
        assert durable(self.machine) == before
        return found.code

    def save_model(self, trainer: str, seconds: float = 30.0) -> tuple[bool, float]:
        found = self.ask(RequestSaveModel(self.number(trainer), trainer, seconds))
        assert isinstance(found, SaveModelAnswer), found
        return found.granted, found.seconds

    def counts(self, pass_index: int = 0) -> tuple[int, int, int]:
        """Todo, pending, done."""
        found = self.machine.counts()[str(pass_index)]
        return found.todo, found.pending, found.done
