"""The modules `threading`, `time` and `concurrent.futures` of simulated processes."""

from __future__ import annotations

import math
import threading as real
import time as real_time
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.sim.world import Task, World

TICK = 1e-8
BEGAN = 1_700_000_000.0
"""The clock on the wall shows this at the beginning, in seconds."""


class SimTime:
    """The module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        self._world.now += TICK  # no two looks at a clock show the same
        return self._world.now

    perf_counter = monotonic

    def time(self) -> float:
        task = self._world.current
        return BEGAN + self._world.now + (task.process.skew if task is not None else 0.0)

    def time_ns(self) -> int:
        return int(1e9 * self.time())

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)


class _Waiters:
    """Threads that wait for something, in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._tasks: deque[Task] = deque()

    def wait(self, until: float) -> None:
        task = self.world.current
        assert task is not None
        self._tasks.append(task)
        try:
            self.world.park(until)
        finally:
            if task in self._tasks:
                self._tasks.remove(task)

    def wake(self, count: int) -> None:
        while self._tasks and count:
            count -= 1
            self.world.wake(self._tasks.popleft())


class SimLock:
    """`threading.Lock`, and `RLock`."""

    def __init__(self, world: World, again: bool = False) -> None:
        self._world, self._again = world, again
        self._owner: Task | None = None
        self._count = 0
        self._waiters = _Waiters(world)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._world.check()
        me = self._world.current
        if self._count and self._again and self._owner is me:
            self._count += 1
            return True
        end = math.inf if timeout < 0 else self._world.now + timeout
        while self._count and (self._owner is None or self._owner.process.alive):
            if not blocking or self._world.now >= end:
                return False
            self._waiters.wait(end)
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        if self._owner is not self._world.current:
            return  # of a dead process, whose lock another has by now
        self._count -= 1
        if not self._count:
            self._owner = None
            self._waiters.wake(1)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class SimCondition:
    def __init__(self, world: World, lock: SimLock | None = None) -> None:
        self._world, self._lock = world, lock or SimLock(world, again=True)
        self._waiters = _Waiters(world)
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        end = math.inf if timeout is None else self._world.now + timeout
        count, self._lock._count = self._lock._count, 1
        self._lock.release()
        try:
            self._waiters.wait(end)
        finally:
            if self._world.current is not None and self._world.current.process.alive:
                self._lock.acquire()
                self._lock._count = count
        return self._world.now < end

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = math.inf if timeout is None else self._world.now + timeout
        while not (result := predicate()) and self._world.now < end:
            self.wait(None if end == math.inf else end - self._world.now)
        return result

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake(1 << 30)


class SimEvent:
    def __init__(self, world: World) -> None:
        self._world, self._flag, self._waiters = world, False, _Waiters(world)

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._waiters.wake(1 << 30)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        end = math.inf if timeout is None else self._world.now + timeout
        self._world.check()
        while not self._flag and self._world.now < end:
            self._waiters.wait(end)
        return self._flag


class SimThread:
    def __init__(
        self,
        world: World,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._world, self.name, self._target, self._args, self._kwargs = world, name, target, args, kwargs or {}
        self.daemon, self.ident = daemon, id(self)
        self._ended = SimEvent(world)
        self._started = False

    def start(self) -> None:
        self._started = True
        Task(self._world.process, self.name, self._run).thread = self

    def _run(self) -> None:
        try:
            if self._target is not None:
                self._target(*self._args, **self._kwargs)
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._started and not self._ended.is_set()


class SimThreading:
    """The module `threading`."""

    local = real.local

    def __init__(self, world: World) -> None:
        self._world = world

    def Lock(self) -> SimLock:
        return SimLock(self._world)

    def RLock(self) -> SimLock:
        return SimLock(self._world, again=True)

    def Condition(self, lock: SimLock | None = None) -> SimCondition:
        return SimCondition(self._world, lock)

    def Event(self) -> SimEvent:
        return SimEvent(self._world)

    def Thread(self, *args: Any, **options: Any) -> SimThread:
        return SimThread(self._world, *args, **options)

    def current_thread(self) -> SimThread:
        return self._thread_of(self._world.current)

    def main_thread(self) -> SimThread:
        return self._thread_of(self._world.process.main)

    def enumerate(self) -> list[SimThread]:
        return [self._thread_of(task) for task in self._world.process.tasks]

    def _thread_of(self, task: Task | None) -> SimThread:
        assert task is not None
        if task.thread is None:
            task.thread = SimThread(self._world, name=task.name)
        return task.thread


class SimFuture:
    def __init__(self, world: World) -> None:
        self._done = SimEvent(world)
        self._state = "pending"
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> bool:
        if self._state != "pending":
            return False
        self._state = "cancelled"
        self._done.set()
        return True

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        assert self._state != "cancelled"
        if self._error is not None:
            raise self._error
        return self._value

    def run(self, call: Callable[[], Any]) -> None:
        if self._state != "pending":
            return
        self._state = "running"
        try:
            self._value = call()
        except Exception as error:
            self._error = error
        self._state = "done"
        self._done.set()


class SimThreadPool:
    """`ThreadPoolExecutor` of one thread."""

    def __init__(self, world: World, max_workers: int = 1, thread_name_prefix: str = "pool") -> None:
        assert max_workers == 1
        self._world, self._name = world, thread_name_prefix
        self._calls: deque[tuple[SimFuture, Callable[[], Any]]] = deque()
        self._changed = SimCondition(world)
        self._thread: SimThread | None = None
        self._closed = False

    def submit(self, call: Callable[..., Any], *args: Any) -> SimFuture:
        future = SimFuture(self._world)
        with self._changed:
            self._calls.append((future, lambda: call(*args)))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = SimThread(self._world, target=self._run, name=self._name)
            self._thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._closed = True
            if cancel_futures:
                while self._calls:
                    self._calls.popleft()[0].cancel()
            self._changed.notify_all()
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return
                future, call = self._calls.popleft()
            future.run(call)
