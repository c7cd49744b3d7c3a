"""One thread at a time trains: two would count the same epochs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from graphft.errors import UsageError


class Alone:
    def __init__(self) -> None:
        self._busy, self._busy_in = threading.Lock(), 0

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Raises UsageError while another call, perhaps of another thread, is in one of these."""
        if not self._busy.acquire(blocking=False):
            inside = self._busy_in == threading.get_ident()
            raise UsageError(
                f"{what} was called " + ("by a callback of train()" if inside else "while another thread trains"),
                rule="busy",
                help="call it when train() has returned"
                if inside
                else "use a Trainer from one thread; workers(), events() and signal() may be called from any",
            )
        self._busy_in = threading.get_ident()
        try:
            yield
        finally:
            self._busy.release()
