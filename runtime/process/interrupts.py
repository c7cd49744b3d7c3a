"""Whether a KeyboardInterrupt is a person's (Ctrl-C reaches every process of a launcher), or user code raised it."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class _Handler:
    """Python's own, which remembers that it was called."""

    def __init__(self) -> None:
        self.called = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.called = True
        signal.default_int_handler(number, frame)


def look_out() -> None:
    """From now on this process knows. Without effect where SIGINT is ignored (no Ctrl-C can come), or somebody else
    handles it."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Handler())


def raised_by_user_code() -> bool:
    """Of a KeyboardInterrupt: whether it is known that no SIGINT has come."""
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.SIG_IGN or (isinstance(handler, _Handler) and not handler.called)
