"""The coordinator's task queues: todo, pending and done in memory, with the transitions of the queue in etcd
(`chunk_queue.Todo`).

The driver saves `take_changes()`, under the coordinator's lock, before it sends the answers. So an answer never tells
what a successor does not know, and a call that is repeated (its answer was lost, or the coordinator) is answered alike:

| call | the same one again |
| --- | --- |
| get | the tasks that the trainer holds by this call, or none again; a call before its newest one is ignored |
| finish | a task that is done is settled, whoever did it |
| release, fail | the attempt is over: nothing changes |
| requeue | what is todo or pending already stays |

Each attempt has a number of its own: what a trainer says of a task that it has lost is refused. A task whose trainer is
gone, or was not heard of for `timeout` seconds, is todo again; if it did not progress, that counts as a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from graphft.runtime.protocol.chunk_queue import Todo
from graphft.runtime.protocol.events import Tick
from graphft.runtime.protocol.machine import Effect, Machine
from graphft.runtime.protocol.messages import (
    TASK_CALLS,
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
from graphft.runtime.protocol.task_events import (
    Answer,
    Asked,
    Changes,
    Fenced,
    Hopeless,
    Living,
    QueueOptions,
    TookAway,
    fences_of,
    task_problem,
)
from graphft.runtime.protocol.task_pass import ModelSaver, PassTasks, QueueState, Task, TaskCounts, group_of

MAX_GIVEN = 1024
"""Tasks that one call gets at most."""


class TaskQueue(Machine):
    """`passes`: those that are begun and not wholly done. A pass below `begun` that is not among them is done."""

    KIND = "a task queue"

    def __init__(self, options: QueueOptions) -> None:
        super().__init__()
        self.options, self.plan = options, options.plan
        self.exists = (self.plan.batches > 0).astype("uint8").tobytes()
        self.size = self.exists.count(1)
        self.passes: dict[int, PassTasks] = {}
        self.current, self.begun = -1, -1
        """The pass that is worked on (sync: the newest that was asked for), and the highest that was ever begun."""
        self.generation = 0
        self.attempts = 1
        self.living: frozenset[str] = frozenset()
        self.met = False
        """True when it was told who lives since it was loaded."""
        self.saver: ModelSaver | None = None
        self.calls: dict[str, int] = {}
        """The newest call of each trainer."""
        self.closed = self.complete = False
        self._leaving: set[str] = set()
        """Trainers that have said that the job is complete."""
        self._over: list[int] = []
        self._saved = self._head
        """The head that the last changes had."""

    @property
    def _head(self) -> tuple[int, ModelSaver | None, bool, bool]:
        return self.current, self.saver, self.closed, self.complete

    # -- what was saved -----------------------------------------------------------------------------------------

    def begin(self, state: QueueState) -> None:
        """Begins with what a first, partial save has left (sync: when a pass is asked for)."""
        self.attempts, self.generation = state.attempts, state.generation
        if not self.options.sync:
            self._begin(0)

    def load(
        self,
        marker: int,
        counts: dict[str, TaskCounts],
        groups: dict[int, dict[int, bytes]],
        state: QueueState,
        saver: ModelSaver | None,
        now: float,
    ) -> None:
        """Takes in what was saved. `marker`: the pass that is worked on. `groups`: records, by pass and group."""
        self.attempts, self.closed, self.generation = state.attempts, state.closed, state.generation
        self.complete, self.saver = state.complete, saver
        self.current, self.begun = marker, max([min(marker, self.plan.passes - 1), *map(int, counts)])
        for index in sorted(map(int, counts)):
            if counts[str(index)].todo or counts[str(index)].pending:
                self.passes[index] = tasks = PassTasks(index, self.exists, self.plan.seed)
                tasks.load(groups.get(index, {}), now)
        self._over = sorted(groups.keys() - self.passes.keys())
        self._saved = self._head

    def go_on_from(self, before: TaskQueue, now: float) -> None:
        """Takes over what is in memory alone from `before`: what this process had until it loaded again."""
        self.calls, self.story, self._leaving = before.calls, before.story, before._leaving
        self.generation = max(self.generation, before.generation)
        self.attempts = max(self.attempts, before.attempts)
        if before.living:
            self.step(Living(before.living), now)

    def take_changes(self) -> Changes | None:
        """Returns what has changed since the last call, None if nothing has."""
        groups = [(p, group) for p, tasks in self.passes.items() for group in sorted(tasks.touched)]
        if not groups and not self._over and self._head == self._saved:
            return None
        marker = self.current if self.current != self._saved[0] else None
        saver = self.saver if self.saver != self._saved[1] else None
        state = QueueState(self.attempts, self.closed, self.generation, self.complete)
        changes = Changes(groups, self.counts(), state, marker, saver, self._over)
        for tasks in self.passes.values():
            tasks.touched.clear()
        self._saved, self._over = self._head, []
        return changes

    def counts(self) -> dict[str, TaskCounts]:
        """Returns the counts of the passes that are not over, and of the newest one."""
        counts = {str(p): TaskCounts(t.todo, t.pending, t.finished) for p, t in sorted(self.passes.items())}
        for index in {self.current, self.begun} - {-1, self.plan.passes}:
            counts.setdefault(str(index), TaskCounts(0, 0, self.size))
        return counts

    @property
    def unsaved(self) -> bool:
        """True if the trainer that was to save the model has died after all passes were done."""
        return self.saver is not None and not self.saver.trainer

    # -- calls --------------------------------------------------------------------------------------------------

    def problem(self, call: TASK_CALLS) -> str:
        return task_problem(self.options, self.exists, call)

    def _asked(self, event: Asked) -> list[Effect]:
        call = event.call
        if problem := self.problem(call):
            return [Answer(event.peer, TasksRefused(call.call, "malformed", problem))]
        newest = self.calls.get(call.trainer, 0)
        if isinstance(call, GetTasks) and call.call < newest:
            return []  # an echo: its trainer has made other calls since
        effects = self.CALLS[type(call)](self, event, call)
        if not isinstance(call, RenewTasks) and call.trainer in self.living:
            self.calls[call.trainer] = max(newest, call.call)
        return effects

    # -- get ----------------------------------------------------------------------------------------------------

    def _get(self, event: Asked, call: GetTasks) -> list[Effect]:
        if call.trainer not in self.living:
            return [Answer(event.peer, TasksRefused(call.call, "unknown", f"{call.trainer} is not registered"))]
        if self.closed:
            return [Answer(event.peer, Tasks(call.call, self.current, []))]
        if self.options.sync:
            return self._get_of_slot(event.peer, call)
        effects, given, newest = list[Effect](), list[tuple[int, int]](), self.calls.get(call.trainer, 0)
        if call.pass_index == self.current and self.current in self.passes:
            if newest in (0, call.call):  # a coordinator before, or this one, may have answered it
                held = self.passes[self.current].held({call.trainer})
                given = sorted((chunk, task.attempt) for chunk, task in held if task.call == call.call)
            if not given and newest != call.call:
                given = self._give(call, effects)
                self._roll()
        return [*effects, Answer(event.peer, Tasks(call.call, self.current, given))]

    def _give(self, call: GetTasks, effects: list[Effect]) -> list[tuple[int, int]]:
        tasks = self.passes[self.current]
        share = max(1, tasks.todo // max(1, len(self.living)))
        limit = min(call.want, share, MAX_GIVEN)
        given: list[tuple[int, int]] = []
        while len(given) < limit and (chunk := tasks.next_free()) is not None:
            before = tasks.open.get(chunk)
            if before is not None and before.todo.claimed(before.todo.progress, True).failures >= self.options.max_lost:
                effects.append(Hopeless(tasks.index, chunk))
                continue
            given.append((chunk, self._give_one(tasks, chunk, call, vanished=True)))
        return given

    def _give_one(self, tasks: PassTasks, chunk: int, call: GetTasks, *, vanished: bool) -> int:
        attempt, self.attempts = self.attempts, self.attempts + 1
        tasks.give(chunk, call.trainer, call.slot, attempt, call.call, self._now, vanished=vanished)
        return attempt

    def _get_of_slot(self, peer: bytes, call: GetTasks) -> list[Effect]:
        """Sync: who holds the slot holds the task. A holder before is displaced, without a failure; what was done in a
        generation that was rolled back is done again."""
        if call.holds <= 0:  # as a fence, it would hold while nobody has the slot
            return [self._not_its_slot(peer, call)]
        self._close_applied(call.lowest, call.pass_index)
        tasks = self._pass(call.pass_index)
        if call.pass_index > self.current or (call.generation > self.generation and call.pass_index < self.current):
            self.current = call.pass_index
        self.generation = max(call.generation, self.generation)
        before = {chunk: tasks.open.get(chunk) for chunk in call.chunks}
        given = []
        for chunk, task in before.items():
            mine = task is not None and task.holder == call.trainer and task.slot == call.slot
            if mine and task is not None and task.call == call.call:
                given.append((chunk, task.attempt))
            else:
                given.append((chunk, self._give_one(tasks, chunk, call, vanished=False)))
        return [Answer(peer, Tasks(call.call, call.pass_index, given), fences_of(call))]

    def _not_its_slot(self, peer: bytes, call: GetTasks) -> Answer:
        return Answer(peer, TasksRefused(call.call, "fenced", f"slot {call.slot} is not {call.trainer}'s"))

    def _close_applied(self, lowest: int, before: int) -> None:
        """Sync: completes passes before this one that every shard has applied, also if a holder did not say so."""
        for index in [p for p in self.passes if p < before and self.plan.start_steps[p + 1] <= lowest]:
            self._drop(index)

    # -- what becomes of them -----------------------------------------------------------------------------------

    def _finish(self, event: Asked, call: FinishTasks) -> list[Effect]:
        refused, finished = [], False
        tasks = self.passes.get(call.pass_index)
        for chunk, attempt in call.tasks:
            if tasks is not None and self._holds(call, call.pass_index, chunk, attempt):
                tasks.finish(chunk)
                finished = True
            elif not tasks.done[chunk] if tasks is not None else call.pass_index > self.begun:
                refused.append(chunk)
        self._roll()
        return [Answer(event.peer, TasksSettled(call.call, refused), fences_of(call) if finished else ())]

    def _fenced(self, event: Fenced) -> list[Effect]:
        """Async: a shard has gone back since it acknowledged these tasks, which are to do again."""
        call = event.call
        if isinstance(call, GetTasks):
            return [self._not_its_slot(event.peer, call)]
        for chunk, attempt in call.tasks:
            if task := self._holds(call, call.pass_index, chunk, attempt):
                self.put(call.pass_index, chunk, task.todo.released(task.todo.progress))
        return [Answer(event.peer, TasksSettled(call.call, [chunk for chunk, _ in call.tasks]))]

    def _release(self, event: Asked, call: ReleaseTasks) -> list[Effect]:
        refused = []
        for chunk, attempt, progress in call.tasks:
            if task := self._holds(call, call.pass_index, chunk, attempt):
                self.put(call.pass_index, chunk, task.todo.released(progress))
            else:
                refused.append(chunk)
        return [Answer(event.peer, TasksSettled(call.call, refused))]

    def _renew(self, event: Asked, call: RenewTasks) -> list[Effect]:
        """Frees tasks that the trainer does not name, though it has had the answer that gave them."""
        named = set()
        for index, chunk, attempt, progress in call.tasks:
            if task := self._holds(call, index, chunk, attempt):
                self.passes[index].note(chunk, task.todo.renewed(progress), self._now)
                named.add((index, chunk))
        for index, tasks in self.passes.items():
            for chunk, task in tasks.held({call.trainer}):
                if task.call <= call.call and (index, chunk) not in named:
                    self.tell(f"{call.trainer} does not know of task {chunk}")
                    tasks.put_back(chunk, task.todo.released(task.todo.progress))
        return []

    def _requeue(self, event: Asked, call: RequeueTasks) -> list[Effect]:
        if not call.tasks or call.pass_index > self.begun or self.closed:
            return [Answer(event.peer, TasksSettled(call.call, [chunk for chunk, _ in call.tasks]))]
        refused: list[int] = []
        tasks = self._pass(call.pass_index)
        for chunk, progress in call.tasks:
            if tasks.done[chunk]:
                tasks.put_back(chunk, Todo(progress=progress))
            else:
                refused.append(chunk)
        if call.pass_index < self.current:
            self.current = call.pass_index
        return [Answer(event.peer, TasksSettled(call.call, refused))]

    def _close(self, event: Asked, call: CloseTasks) -> list[Effect]:
        for index in list(self.passes):
            self._drop(index)
        if not self.options.sync:
            self.begun = self.plan.passes - 1
            self.current = self.plan.passes
        self.closed = True
        if call.complete:
            self.complete = True
            self._leaving.add(call.trainer)
        return [Answer(event.peer, TasksSettled(call.call))]

    def _save_model(self, event: Asked, call: RequestSaveModel) -> list[Effect]:
        saver, until = self.saver, event.wall + call.seconds
        granted = saver is None or saver.until <= event.wall or saver.trainer == call.trainer
        if granted:  # who asks again has at least the time that it asks for
            if saver is not None and saver.trainer == call.trainer:
                until = max(until, saver.until)
            self.saver = saver = ModelSaver(call.trainer, until)
        assert saver is not None
        return [Answer(event.peer, SaveModelAnswer(call.call, granted, max(0.0, saver.until - event.wall)))]

    CALLS: ClassVar[dict[type, Callable[[Any, Asked, Any], list[Effect]]]] = {
        GetTasks: _get,
        FinishTasks: _finish,
        ReleaseTasks: _release,
        RenewTasks: _renew,
        RequeueTasks: _requeue,
        CloseTasks: _close,
        RequestSaveModel: _save_model,
    }

    # -- for the driver, of a batch that failed -----------------------------------------------------------------

    def task(self, pass_index: int, chunk: int) -> Task | None:
        """Returns the task if it is begun."""
        tasks = self.passes.get(pass_index)
        return tasks.open.get(chunk) if tasks is not None else None

    def put(self, pass_index: int, chunk: int, todo: Todo) -> None:
        """Makes it todo again, with this record."""
        self.passes[pass_index].put_back(chunk, todo)

    # -- time and trainers --------------------------------------------------------------------------------------

    def _living(self, event: Living) -> list[Effect]:
        trainers = event.trainers
        dead = self.living - trainers - self._leaving if self.met else frozenset()
        if self.current >= self.plan.passes and self.saver is not None and self.saver.trainer in dead:
            self.saver = ModelSaver("", 0.0)
        self.living, self.met = trainers, True
        for tasks in self.passes.values():
            for chunk, task in tasks.held():
                if task.holder not in trainers:
                    self.tell(f"{task.holder} is gone: task {chunk} is todo")
                    tasks.put_back(chunk, task.todo)
        self.calls = {trainer: call for trainer, call in self.calls.items() if trainer in trainers}
        return []

    def _tick(self, event: Tick) -> list[Effect]:
        """Takes away what was not renewed in time."""
        now = self._now
        effects: list[Effect] = []
        for index, tasks in self.passes.items():
            for chunk, task in tasks.held():
                if now - task.renewed > self.options.timeout:
                    effects.append(TookAway(index, chunk, task.holder, task.slot, now - task.renewed))
                    tasks.put_back(chunk, task.todo)
        return effects

    # -- helpers ------------------------------------------------------------------------------------------------

    def _holds(self, call: Any, pass_index: int, chunk: int, attempt: int) -> Task | None:
        task = self.task(pass_index, chunk)
        return task if task is not None and task.attempt == attempt and task.holder == call.trainer else None

    def _pass(self, index: int) -> PassTasks:
        """Returns the pass. If it was not begun, or is wholly done, its records are made anew."""
        if index not in self.passes:
            self.passes[index] = tasks = PassTasks(index, self.exists, self.plan.seed, done=index <= self.begun)
            if index <= self.begun:
                tasks.touched.update(range(group_of(len(self.exists) - 1) + 1))
            self.begun = max(self.begun, index)
            if index in self._over:
                self._over.remove(index)
        return self.passes[index]

    def _drop(self, index: int) -> None:
        """Ends a pass that is wholly done."""
        del self.passes[index]
        self._over.append(index)

    def _begin(self, index: int) -> None:
        if index < self.plan.passes:
            self._pass(index)
        self.current = index

    def _roll(self) -> None:
        """Async: begins the next pass when this one is over."""
        while not self.options.sync and self.current in self.passes and self.passes[self.current].over:
            self._drop(self.current)
            later = [p for p in self.passes if p > self.current]
            self._begin(min(later) if later else self.begun + 1)
            self.tell(f"pass {self.current} begins")

    EVENTS: ClassVar[dict[type, Callable[[Any, Any], list[Any]]]] = {
        Asked: _asked,
        Fenced: _fenced,
        Living: _living,
        Tick: _tick,
    }

    def invariants(self) -> dict[str, bool]:
        return {f"pass {p}: {fact}": holds for p, t in self.passes.items() for fact, holds in t.invariants().items()}
