"""Children that are killed at one operation on the disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

CALLS = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "rename", "close")
"""Functions of module os: all that a save does to the disk."""


TRIES, CHILD_SECONDS = 10, 60


def die_at(count: int, work: Callable[[], object]) -> bool:
    """A child process does the work, and is killed before its `count`-th operation. Whether it was; not if it had
    fewer. A fork of a process in which gRPC has threads may crash or hang instead (seen at a load of 20): that is no
    kill, and another child does the work."""
    for _ in range(TRIES):
        status = _status_of(count, work)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return False
        if os.WTERMSIG(status) == signal.SIGKILL:
            return True
    raise AssertionError(f"{TRIES} children crashed: {signal.Signals(os.WTERMSIG(status)).name}")


def _status_of(count: int, work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_SECONDS)
        done = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*arguments: Any, **options: Any) -> Any:
                nonlocal done
                done += 1
                if done == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return called

        try:
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]
