"""What a step need not wait for: calls that one thread makes, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """Used by one thread. What a task raises is raised to it: by `wait`, or by the next `check`."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._open: deque[Future[None]] = deque()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Makes `call` after those that were submitted before. The caller looks at its result."""
        return self._thread.submit(call)

    def run(self, call: Callable[[], None]) -> None:
        """Makes `call` in the same order; `check` and `wait` look at how it ended."""
        self._open.append(self.submit(call))

    def check(self) -> None:
        """Raises what a call that was run has raised since."""
        while self._open and self._open[0].done():
            self._open.popleft().result()

    def wait(self) -> None:
        """Returns when all calls that were run are made."""
        while self._open:
            self._open.popleft().result()

    def close(self) -> None:
        """Ends the thread after the call that it is making; those that wait are not made."""
        self._thread.shutdown(cancel_futures=True)
