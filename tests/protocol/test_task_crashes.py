"""Coordinators that crash between any two writes, and calls that are lost or repeated: no task is lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphft.runtime.protocol.events import Tick
from graphft.runtime.protocol.messages import (
    FinishTasks,
    GetTasks,
    ReleaseTasks,
    RenewTasks,
    RequeueTasks,
    Tasks,
    TasksRefused,
    TasksSettled,
)
from graphft.runtime.protocol.task_events import Answer, Asked, Hopeless, Living, QueueOptions
from graphft.runtime.protocol.task_queue import TaskQueue
from tests.protocol.task_rigs import WIDE, Saved

TASKS = [chunk for chunk, count in enumerate(WIDE.batches.tolist()) if count]
Key = tuple[int, int]
"""Pass and chunk."""


@dataclass
class Caller:
    """As `TaskClient`: one call at a time, the same one again until it is answered."""

    name: str
    numbers: int = 0
    waits: Any = None
    held: dict[Key, int] = field(default_factory=dict)
    known: int = 0
    """All that calls up to this one gave is held, or was."""
    pass_index: int = 0

    def call(self, make: Any, **options: Any) -> None:
        self.numbers += 1
        self.waits = make(self.numbers, self.name, **options)

    def take(self, answer: Any) -> None:
        waits = self.waits
        if waits is None or waits.call != answer.call:
            return  # to an earlier call
        if isinstance(answer, TasksRefused):
            assert answer.code == "unknown"
            return  # it asks again
        self.waits = None
        if isinstance(answer, Tasks):
            self.held |= {(waits.pass_index, chunk): attempt for chunk, attempt in answer.tasks}
            self.known, self.pass_index = answer.call, answer.pass_index
        elif not isinstance(waits, RequeueTasks):
            assert isinstance(answer, TasksSettled)
            for chunk, attempt, *_ in waits.tasks:
                if self.held.get((waits.pass_index, chunk)) == attempt:
                    del self.held[waits.pass_index, chunk]


class Coordinators(RuleBasedStateMachine):
    """`callers`: two trainers, each replaced when it dies, and a shard. `done`: tasks that etcd says are done; what a
    process knows besides is lost with it."""

    def __init__(self) -> None:
        super().__init__()
        self.options = QueueOptions(WIDE, False, 1, timeout=60.0, max_lost=4)
        self.saved, self.now = Saved(), 0.0
        self.callers = [Caller("a0"), Caller("b0"), Caller("shard")]
        self.inbox: list[Any] = []
        self.sent: list[Any] = []
        self.done: frozenset[Key] = frozenset()
        self.completions: Counter[Key] = Counter()
        self.undone: Counter[Key] = Counter()
        self.attempts: dict[int, tuple[int, int, str]] = {}
        """The holders of tasks by each number."""
        self.machine = self.saved.load(self.options, self.now)
        self.save()

    # -- what is durable ----------------------------------------------------------------------------------------

    def take_over(self) -> None:
        self.machine = self.saved.load(self.options, self.now)
        self.see()

    def see(self) -> None:
        self.machine.step(Living(frozenset(c.name for c in self.callers[:2])), self.now)

    def save(
        self, parts: int | None = None, finished: set[Key] | None = None, requeued: set[Key] | None = None
    ) -> bool:
        """True if this process lives on. Whatever is done, or not done any more, has been asked for just now."""
        lives = self.saved.write(self.machine, parts)
        known, before = self.saved.load(self.options, self.now), self.done
        self.done = frozenset((p, c) for p in range(WIDE.passes) for c in TASKS if is_done(known, p, c))
        assert self.done - before <= (finished or set()), "done by nobody that held it"
        assert before - self.done <= (requeued or set()), "forgotten"
        self.completions.update(self.done - before)
        self.undone.update(before - self.done)
        for index, tasks in known.passes.items():
            for chunk, task in tasks.open.items():
                if task.holder:
                    key = index, chunk, task.holder
                    assert self.attempts.setdefault(task.attempt, key) == key, "a number of two attempts"
        return lives

    # -- callers ------------------------------------------------------------------------------------------------

    trainers = st.integers(0, 1)

    @rule(which=trainers, want=st.integers(1, 4))
    def get(self, which: int, want: int) -> None:
        caller = self.callers[which]
        if caller.waits is None:
            caller.call(GetTasks, pass_index=caller.pass_index, want=want)

    @rule(which=trainers, finish=st.booleans(), data=st.data())
    def end(self, which: int, finish: bool, data: st.DataObject) -> None:
        caller = self.callers[which]
        if caller.waits is not None or not caller.held:
            return
        index = data.draw(st.sampled_from(sorted({p for p, _ in caller.held})))
        mine = [(chunk, attempt) for (p, chunk), attempt in caller.held.items() if p == index]
        some = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
        if finish:
            caller.call(FinishTasks, pass_index=index, tasks=some)
        else:
            caller.call(ReleaseTasks, pass_index=index, tasks=[(*task, 0) for task in some])

    @rule(index=st.integers(0, 1), chunks=st.sets(st.sampled_from(TASKS), min_size=1))
    def go_back(self, index: int, chunks: set[int]) -> None:
        """A shard lacks these; it says so until it is heard."""
        if self.callers[2].waits is None and sum(self.undone.values()) < 20:
            self.callers[2].call(RequeueTasks, pass_index=index, tasks=[(chunk, 0) for chunk in chunks])

    @rule()
    def send(self) -> None:
        """Whoever waits asks (again)."""
        calls = [caller.waits for caller in self.callers if caller.waits is not None]
        self.inbox += calls
        self.sent += calls

    @rule(which=trainers)
    def renew(self, which: int) -> None:
        caller = self.callers[which]
        tasks = [(*key, attempt, 0) for key, attempt in caller.held.items()]
        self.inbox.append(RenewTasks(caller.known, caller.name, tasks))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def echo(self, data: st.DataObject) -> None:
        self.inbox.append(data.draw(st.sampled_from(self.sent)))

    @rule(which=trainers)
    def die(self, which: int) -> None:
        old = self.callers[which].name
        self.callers[which] = Caller(f"{old[0]}{int(old[1:]) + 1}")

    # -- the coordinator ----------------------------------------------------------------------------------------

    @rule(data=st.data(), parts=st.sampled_from([None, None, None, 0, 1, 2]), sees=st.booleans())
    def work(self, data: st.DataObject, parts: int | None, sees: bool) -> None:
        """`parts`: it dies when it has written so much. Answers may be lost."""
        self.round(parts, sees, lambda: data.draw(st.sampled_from([True, True, False])))

    def round(self, parts: int | None, sees: bool, arrives: Callable[[], bool]) -> None:
        calls, self.inbox = self.inbox, []
        finished: set[Key] = set()
        requeued: set[Key] = set()
        if sees:
            self.see()
        answers, hopeless = [], []
        for call in calls:
            finished |= {
                (call.pass_index, chunk)
                for chunk, attempt in (call.tasks if isinstance(call, FinishTasks) else ())
                if (t := self.machine.task(call.pass_index, chunk)) and (t.holder, t.attempt) == (call.trainer, attempt)
            }
            requeued |= {(call.pass_index, c) for c, _ in (call.tasks if isinstance(call, RequeueTasks) else ())}
            effects = self.machine.step(Asked(b"", call), self.now)
            answers += [(call.trainer, effect.message) for effect in effects if isinstance(effect, Answer)]
            hopeless += [effect for effect in effects if isinstance(effect, Hopeless)]
        if not self.save(parts, finished, requeued):
            self.take_over()
            return
        for name, answer in answers:
            if arrives():
                self.deliver(name, answer)
        for effect in hopeless:
            todo = self.machine.passes[effect.pass_index].open[effect.chunk].todo
            self.machine.put(effect.pass_index, effect.chunk, todo.discarded(todo.progress))
        self.save()

    def deliver(self, name: str, answer: Any) -> None:
        for caller in self.callers:
            if caller.name == name:
                caller.take(msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=type(answer)))

    @rule()
    def crash(self) -> None:
        self.take_over()

    @rule(seconds=st.sampled_from([1.0, 40.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.machine.step(Tick(), self.now)
        self.save()

    @invariant()
    def it_is_sound(self) -> None:
        self.machine.check_invariants()
        assert all(self.completions[key] == 1 + self.undone[key] for key in self.done)

    def teardown(self) -> None:
        """Left alone, the trainers bring every pass to its end."""
        for _ in range(200):
            if self.machine.current == WIDE.passes and all(c.waits is None for c in self.callers):
                break
            self.turn()
        assert self.machine.current == WIDE.passes, "it does not end"
        assert self.done == {(p, c) for p in range(WIDE.passes) for c in TASKS}
        assert all(self.completions[key] == 1 + self.undone[key] for key in self.done)

    @rule(turns=st.integers(1, 4))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    def turn(self) -> None:
        """All trainers do their work."""
        for caller in self.callers:
            index = min((p for p, _ in caller.held), default=caller.pass_index)
            mine = [(chunk, attempt) for (p, chunk), attempt in caller.held.items() if p == index]
            if caller.waits is None and caller.name != "shard":
                if mine:
                    caller.call(FinishTasks, pass_index=index, tasks=mine)
                else:
                    caller.call(GetTasks, pass_index=caller.pass_index, want=2)
            self.inbox.append(RenewTasks(caller.known, caller.name, [(*k, a, 0) for k, a in caller.held.items()]))
        self.send()
        self.round(None, True, lambda: True)


def is_done(machine: TaskQueue, index: int, chunk: int) -> bool:
    if index in machine.passes:
        return bool(machine.passes[index].done[chunk])
    return index <= machine.begun


TestCoordinators = Coordinators.TestCase
