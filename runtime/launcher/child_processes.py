"""What roles start by themselves (a lease keeper; whatever user code starts), and leave to the launcher when they die.

The launcher adopts them, for it is a subreaper. One that has ended must be collected, or it keeps its process id until
the launcher ends, and a long job has many preemptions. One that lives must end, for it works for no role any more, and
holds what it has inherited (connections, a GPU).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from graphft.runtime.process.identity import STARTED, Identity, identify, stat_of


class ChildProcesses:
    """Knows the children of the roles as of the last look, by any thread; one that was started after it is not seen.
    Linux only."""

    def __init__(self) -> None:
        self._known: set[Identity] = set()
        self._lock = threading.Lock()

    @property
    def left(self) -> bool:
        """Whether some of them are still there."""
        return bool(self._known)

    def look(self, roles: Iterable[Identity]) -> None:
        """Notes whom these roles have as children, if they live; ends, and collects, what others have left."""
        with self._lock:
            for role in roles:
                if identify(role.pid) == role:
                    self._known.update(_children(role.pid))
            self._known = {child for child in self._known if not _is_gone(child)}


def _children(pid: int) -> list[Identity]:
    """Living children of a process. Each of its threads has its own; and a thread's id names its process in /proc, so
    they are asked for their parent: it might be this process."""
    found: list[Identity] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # that thread has ended meanwhile
                found += [identify(int(child)) for child in (task / "children").read_text().split()]
    return [child for child in found if child.pid and stat_of(child.pid)[1:2] == [str(pid)]]


def _is_gone(child: Identity) -> bool:
    """Whether it has ended, and is collected; if this process has adopted it, it is killed."""
    stat = stat_of(child.pid)
    if not stat or int(stat[STARTED]) != child.started:
        return True
    state, parent = stat[:2]
    if int(parent) != os.getpid():
        return False
    if state not in "ZX":
        with contextlib.suppress(OSError):  # somebody else has collected it meanwhile; or it runs as another user
            os.kill(child.pid, signal.SIGKILL)
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    return True
