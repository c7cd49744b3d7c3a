"""Signals: where none may raise, whose KeyboardInterrupt it is, and waiting for one.

Python runs a signal's handler in the main thread, between any two bytecodes: what it raises may come between the taking
of a lock and the `with` that would give it back. gRPC's locks are taken so, and whoever calls next waits for ever. For
the same reason a handler takes no lock that the code under it may hold.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

Handle = Callable[[int, FrameType | None], Any]
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""What a program has handlers for that raise: Ctrl-C, to be ended, its terminal's end, and time-outs."""


class _Held:
    """Of the main thread: how many blocks hold signals back; which have come meanwhile, with what is to be called."""

    def __init__(self) -> None:
        self.depth = 0
        self.came: dict[int, Handle] = {}


_held = _Held()


class Handler:
    """Another handler, that waits for the end of an `uninterrupted` block, and remembers that it was called."""

    def __init__(self, then: Handle) -> None:
        self.then, self.called = then, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _held.depth:
            _held.came[number] = self
        else:
            self.called = True
            self.then(number, frame)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Handlers are called at the end of the block: it is to be a short one. (What `faulthandler.register` has set up
    for one of these signals does not survive it.)"""
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
    """Calls what was held back, all of it, though a handler raises. It is no new signal: asyncio has counted it."""
    if _held.came and not _held.depth:
        number, handler = _held.came.popitem()
        try:
            handler(number, sys._getframe())
        finally:
            _hand_over()


def look_out() -> None:
    """From now on this process knows whether SIGINT has come. Without effect where that is ignored (no Ctrl-C can
    come), or somebody else handles it."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, Handler(signal.default_int_handler))


def raised_by_user_code() -> bool:
    """Of a KeyboardInterrupt (Ctrl-C reaches every process of a launcher): whether it is known that no SIGINT has
    come, nor another signal that raises one."""
    handler, *others = (signal.getsignal(number) for number in HELD)
    if any(isinstance(other, Handler) and other.called for other in others):
        return False
    return handler is signal.SIG_IGN or (isinstance(handler, Handler) and not handler.called)


class Asked:
    """Whether one of these signals has come since this was made, in the main thread.

    An `Event` will not do: `set()` waits for the lock that `wait()` holds at times, and the handler runs within it. A
    SimpleQueue's `put` may come within its own `get` (so says its documentation).
    """

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
