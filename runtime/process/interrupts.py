"""Signals: where no handler may raise, and waiting for a signal.

Python runs a signal's handler between any two bytecodes of the main thread: its exception may come between the taking
of a lock (gRPC's) and the `with` that would give it back. For the same reason a handler takes no lock."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

Handle = Callable[[int, FrameType | None], Any]
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals whose handlers raise: Ctrl-C, to be ended, its terminal's end, and time-outs."""


@dataclass
class _Held:
    """`depth` blocks of the main thread hold signals back; `came`: the handlers of those that have come meanwhile."""

    depth: int = 0
    came: dict[int, Handle] = field(default_factory=dict)


_held = _Held()


class Handler:
    """A handler that waits for the end of an `uninterrupted` block."""

    def __init__(self, then: Handle) -> None:
        self.then = then

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _held.depth:
            _held.came[number] = self.then
        else:
            self.then(number, frame)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Handlers are called at the end of the block, which is to be a short one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _held.depth += 1
    swapped: dict[signal.Signals, Any] = {}
    try:
        for number in HELD:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, Handler):
                swapped[number] = handler
                signal.signal(number, Handler(handler))
        yield
    finally:
        _held.depth -= 1
        try:  # from here on each may raise: one that is not put back does then what it did before
            for number, handler in swapped.items():
                signal.signal(number, handler)
        finally:
            _hand_over()


def _hand_over() -> None:
    """Calls the handlers that were held back, all of them, though one raises. It is no new signal: asyncio has counted
    it."""
    if _held.came and not _held.depth:
        number, handler = _held.came.popitem()
        try:
            handler(number, sys._getframe())
        finally:
            _hand_over()


class Asked:
    """Waits, in the main thread, for one of these signals since this was made. An `Event` will not do: `set()` waits
    for the lock that `wait()` holds at times, and the handler runs within it. A SimpleQueue's `put` may come within its
    own `get` (so says its documentation)."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            signal.signal(number, lambda came, _: self._came.put(came))

    def wait(self, timeout: float | None = None) -> bool:
        """At most for `timeout` seconds. True once, for each signal."""
        try:
            self._came.get(timeout=timeout)
        except queue.Empty:
            return False
        return True
