"""A small cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """The `size` values last used."""

    def __init__(self, size: int) -> None:
        self._size, self._items = size, OrderedDict[K, V]()

    def get(self, key: K) -> V | None:
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def put(self, key: K, value: V) -> V:
        self._items[key] = value
        while len(self._items) > self._size:
            self._items.popitem(last=False)
        return value
