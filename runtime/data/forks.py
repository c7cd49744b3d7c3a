"""Processes that user code forks while it makes an item: each ends where that code ends, and when it is told to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_OURS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that a role handles, on behalf of its job."""


def forks_are_told_to_end() -> None:
    """From now on forks of this process take signals as any process does: it is by SIGTERM that multiprocessing ends
    its workers, and a handler of a trainer's, which they inherit, would keep them, and who waits for them."""
    fork = _Fork()
    os.register_at_fork(before=fork.begins, after_in_parent=fork.is_over, after_in_child=fork.is_here)


class _Fork(threading.local):
    """What a thread does that forks. A signal that comes before the fork has forgotten the handlers has to wait, or
    one of them would take it."""

    def begins(self) -> None:
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)

    def is_over(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def is_here(self) -> None:
        for number in _OURS:
            signal.signal(number, signal.SIG_DFL)
        self.is_over()


@contextmanager
def forks_end_here() -> Iterator[None]:
    """A process that was forked inside, and leaves the block, ends with the status that it would have had alone.

    It is a copy of a trainer, with its connections: it must neither go on as one, nor wait for ever as a thread of one.
    """
    here = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != here:
            os._exit(_status(error))
        raise
    if os.getpid() != here:
        os._exit(0)


def _status(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
