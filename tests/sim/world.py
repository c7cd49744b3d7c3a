"""A simulated machine room: one clock, one random generator, and processes whose threads are greenlets.

One greenlet runs at a time, and gives way only where a thread could block: at a wait, a sleep, a call of etcd, a
message, a file. What it does in between takes no time. So everything that happens is a function of the seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet
import torch

MAX_SWITCHES = 400_000
"""A simulation that needs more goes round in circles."""
JITTER = 2e-5
"""Seconds: what is woken runs after a random part of it, so that the order of threads is not always the same."""


class SimulationFailed(AssertionError):
    """A promise was broken; the message ends with the newest lines of the story."""


class Died(greenlet.GreenletExit):
    """This simulated process is dead: nothing that it does has an effect any more."""


class World:
    """Time in seconds. `story`: (time, who, text, values) of what happened, the newest last."""

    def __init__(self, seed: int, lines: int = 6000) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.story: deque[tuple[float, str, str, Any]] = deque(maxlen=lines)
        self._hub = greenlet.getcurrent()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._switches = 0

    # -- time -------------------------------------------------------------------------------------------------------

    def at(self, time: float, event: Callable[[], object]) -> None:
        """`event()` at that time, by no process."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), event))

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        self.at(self.now + seconds, event)

    def run(self, done: Callable[[], bool], limit: float) -> None:
        """Until `done()`; fails when that does not come true before the time `limit`."""
        while not done():
            if not self._events or self._events[0][0] > limit:
                raise SimulationFailed(f"nothing ended before {limit:.0f} s")
            time, _, event = heapq.heappop(self._events)
            self.now = max(self.now, time)
            event()

    def tell(self, who: str, text: str, values: Any = ()) -> None:
        self.story.append((self.now, who, text, values))

    def lines(self) -> list[str]:
        return [f"{time:9.4f} {who}: {text % values if values else text}" for time, who, text, values in self.story]

    # -- tasks ------------------------------------------------------------------------------------------------------

    @property
    def process(self) -> Process:
        """Whose code runs now."""
        assert self.current is not None
        return self.current.process

    def check(self) -> None:
        """Raises Died in a thread of a dead process."""
        if self.current is not None and not self.current.process.alive:
            raise Died

    def park(self, until: float = math.inf) -> None:
        """The running thread waits to be woken, or for that time."""
        self.check()
        task = self.current
        assert task is not None, "only a process's thread can wait"
        task.turn += 1
        turn = task.turn
        if until < math.inf:
            self.at(until, lambda: self._resume(task, turn))
        self._hub.switch()
        self.check()

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        self.park(end)
        while self.now < end:
            self.park(end)

    def wake(self, task: Task) -> None:
        """Lets a parked thread look again."""
        turn = task.turn
        self.after(JITTER * self.random.random(), lambda: self._resume(task, turn))

    def _resume(self, task: Task, turn: int) -> None:
        if task.turn != turn or not task.process.alive:
            return  # it has run since
        if task.process.frozen:
            task.process.held.append((task, turn))
            return
        self._switches += 1
        if self._switches > MAX_SWITCHES:
            raise SimulationFailed(f"going round in circles: {task.process.name}, {task.name}")
        task.turn += 1
        self.switch_to(task)

    def switch_to(self, task: Task) -> None:
        """torch keeps for each thread whether gradients are recorded; greenlets are one thread to it."""
        before, self.current = self.current, task
        mode = torch.is_grad_enabled()
        if task.records_gradients != mode:
            torch._C._set_grad_enabled(task.records_gradients)
        try:
            task.greenlet.switch()
        finally:
            task.records_gradients = torch.is_grad_enabled()
            if task.records_gradients != mode:
                torch._C._set_grad_enabled(mode)
            self.current = before

    def effect(self, what: str) -> None:
        """The running process is about to change something outside of it: it may die here."""
        if self.current is not None:
            process = self.current.process
            self.check()
            process.effects += 1
            if process.effects == process.dies_at:
                self.tell(process.name, "dies before effect %d, %s", (process.effects, what))
                process.kill()
                raise Died


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, name: str, run: Callable[[], object]) -> None:
        self.process, self.name = process, name
        self.turn = 0
        """Counts its waits: a wake-up of an earlier one is void."""
        self.thread: Any = None
        self.records_gradients = True
        self._run = run
        self.greenlet = greenlet.greenlet(self._body, process.world._hub)
        process.tasks.append(self)
        world = process.world
        world.after(world.random.uniform(0, JITTER), lambda: world._resume(self, 0))

    def _body(self) -> None:
        try:
            self._run()
        finally:
            self.process.tasks.remove(self)


class Process:
    """`main` runs on its first thread, and returns the exit status. `ended`: called with the status, None if killed."""

    def __init__(
        self, world: World, name: str, main: Callable[[], int], ended: Callable[[Process, int | None], object]
    ) -> None:
        self.world, self.name, self._ended = world, name, ended
        self.pid = 1000 + len(world.processes)
        world.processes.append(self)
        self.alive, self.frozen = True, False
        self.held: list[tuple[Task, int]] = []
        self.tasks: list[Task] = []
        self.at_end: list[Callable[[], object]] = []
        """Called when the process ends: its sockets close."""
        self.effects, self.dies_at = 0, 0
        self.skew = 0.0
        """Seconds that its clock on the wall is ahead."""
        self.handlers: dict[int, Callable[..., object]] = {}
        self.main = Task(self, "main", lambda: self.exit(main()))

    def exit(self, status: int | None) -> None:
        """Ends it now, whatever its threads are at. None: it was killed."""
        if not self.alive:
            return
        self.alive = False
        self.world.tell(self.name, "ends with status %s" if status is not None else "is killed%.0s", (status,))
        self.world.after(0, lambda: self._bury(status))

    def kill(self) -> None:
        self.exit(None)

    def _bury(self, status: int | None) -> None:
        for close in self.at_end:
            close()
        self.unwind()
        self._ended(self, status)

    def unwind(self) -> None:
        """Takes down what is left of its threads; it must be dead."""
        mode = torch.is_grad_enabled()
        for task in list(self.tasks):
            self.world.current = task
            task.greenlet.throw(Died)
            self.world.current = None
        torch.set_grad_enabled(mode)

    def freeze(self, seconds: float) -> None:
        """As SIGSTOP and, later, SIGCONT."""
        if self.alive and not self.frozen:
            self.frozen = True
            self.world.tell(self.name, "is stopped for %.1f s", (seconds,))
            self.world.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        if self.alive:
            self.world.tell(self.name, "goes on")
        held, self.held = self.held, []
        for task, turn in held:
            self.world._resume(task, turn)

    def signal(self, number: int) -> None:
        """Its handler runs at once: it may only note what was asked for."""
        if self.alive and number in self.handlers:
            self.handlers[number](number, None)
