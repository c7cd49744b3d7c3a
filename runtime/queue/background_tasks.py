"""What a step need not wait for: calls that run one after the other on a thread of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Errands:
    """Used by one thread. What an errand raises is raised to it: by `wait`, or by the next `check`."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._open: deque[Future[None]] = deque()

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Has `call` made behind those that were begun before. Whoever begins it looks at its result."""
        return self._thread.submit(call)

    def leave(self, call: Callable[[], None]) -> None:
        """Has `call` made; `check` and `settle` look at how it ended."""
        self._open.append(self.begin(call))

    def check(self) -> None:
        """Raises what a call that was left has raised since."""
        while self._open and self._open[0].done():
            self._open.popleft().result()

    def settle(self) -> None:
        """Returns when all calls that were left are made."""
        while self._open:
            self._open.popleft().result()

    def close(self) -> None:
        """Ends the thread behind the call that it is making; others are not made any more."""
        self._thread.shutdown(cancel_futures=True)
