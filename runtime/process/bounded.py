"""Waiting for something outside only so long: a storage that is away answers after minutes, or never."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from graphft.errors import GraphftError

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """What `call` returns, or `otherwise` if that takes longer, or it raises OSError or GraphftError. It goes on in a
    thread of its own then, until this process ends."""
    found: list[T] = []

    def work() -> None:
        try:
            found.append(call())
        except (OSError, GraphftError):
            return

    thread = threading.Thread(target=work, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise
