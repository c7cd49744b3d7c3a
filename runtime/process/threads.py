"""Threads that wait for something outside: for a bounded time, or for many things at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from graphft.errors import GraphftError

T = TypeVar("T")
R = TypeVar("R")
AT_ONCE = 16


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Returns the result of `call`; `otherwise` if that takes longer, or it raises OSError or GraphftError. It goes on
    in a thread of its own then, until this process ends: a storage that is away answers after minutes, or never."""
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


def side_by_side(look: Callable[[T], R], at: Iterable[T]) -> list[R]:
    """Returns the results of `look` in order, each of which is mostly a wait. Raises the first exception of them."""
    prepare_structs()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(look, at))


def prepare_structs() -> None:
    """Has msgspec inspect every struct of graphft: to be called by a process's first thread, before it begins others.
    It does so when it decodes one for the first time, and two threads at the same moment end the process (SIGSEGV)."""
    for struct in _below(msgspec.Struct):
        if struct.__module__.startswith("graphft."):
            msgspec.json.Decoder(struct)


def _below(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for one in struct.__subclasses__():
        yield one
        yield from _below(one)
