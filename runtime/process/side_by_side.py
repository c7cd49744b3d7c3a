"""The same for many things at once, where each is mostly a wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from graphft.runtime.process.structs import prepare_structs

T = TypeVar("T")
R = TypeVar("R")
AT_ONCE = 16


def side_by_side(look: Callable[[T], R], at: Iterable[T]) -> list[R]:
    """What `look` returns of each, in their order. Raises what the first of them raised."""
    prepare_structs()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(look, at))
