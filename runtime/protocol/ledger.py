"""The applied batches of an async shard, as sorted, disjoint [start, end) ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import Any

ALL = 2**31 - 1
"""The end of the range that stands for a whole chunk."""


class Ranges:
    """A set of integers >= 0."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            if start >= end or (self._ends and start <= self._ends[-1]):
                raise ValueError(f"range [{start}, {end}) is empty, or not behind the one before")
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._starts, value) - 1
        return i >= 0 and value < self._ends[i]

    def add(self, value: int) -> bool:
        """False: it is in already."""
        if value in self:
            return False
        i = bisect_right(self._starts, value)
        joins_before = i > 0 and self._ends[i - 1] == value
        joins_behind = i < len(self._starts) and self._starts[i] == value + 1
        if joins_before and joins_behind:
            self._ends[i - 1] = self._ends.pop(i)
            del self._starts[i]
        elif joins_before:
            self._ends[i - 1] += 1
        elif joins_behind:
            self._starts[i] -= 1
        else:
            self._starts.insert(i, value)
            self._ends.insert(i, value + 1)
        return True

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))


NONE = Ranges()


class Ledger:
    """The applied batches of every chunk. A finished pass is one range of chunks."""

    def __init__(self) -> None:
        self._whole: dict[int, Ranges] = {}
        self._partly: dict[int, dict[int, Ranges]] = {}

    def has(self, pass_index: int, chunk: int, batch: int) -> bool:
        return chunk in self._whole.get(pass_index, NONE) or batch in self._part(pass_index, chunk)

    def _part(self, pass_index: int, chunk: int) -> Ranges:
        return self._partly.get(pass_index, {}).get(chunk, NONE)

    def add(self, pass_index: int, chunk: int, batch: int, batches: int) -> bool:
        """Adds a batch of a chunk of `batches`. False: it is in already."""
        if self.has(pass_index, chunk, batch):
            return False
        partly = self._partly.setdefault(pass_index, {})
        ranges = partly.setdefault(chunk, Ranges())
        ranges.add(batch)
        if len(ranges) == batches:
            del partly[chunk]
            self._whole.setdefault(pass_index, Ranges()).add(chunk)
        return True

    def ranges(self, pass_index: int, chunk: int) -> list[tuple[int, int]]:
        """Returns the applied batches of a chunk; [(0, ALL)] for all of them."""
        whole = chunk in self._whole.get(pass_index, NONE)
        return [(0, ALL)] if whole else self._part(pass_index, chunk).pairs()

    def count(self, pass_index: int) -> int:
        """Returns the number of wholly applied chunks of a pass."""
        return len(self._whole.get(pass_index, NONE))

    def lacking(self, pass_index: int, chunks: Collection[int]) -> list[int]:
        """Returns those of the pass's `chunks` that are not wholly applied."""
        whole = self._whole.get(pass_index, NONE)
        return [] if len(whole) == len(chunks) else [c for c in chunks if c not in whole]

    def progress(self, pass_index: int, chunk: int) -> int:
        """Returns the number of applied batches of a chunk that is not wholly applied."""
        return len(self._part(pass_index, chunk))

    def export(self) -> dict[str, Any]:
        """Returns, for JSON, {pass: {"whole": ranges of chunks, "partly": {chunk: ranges of batches}}}."""
        return {
            str(p): {
                "whole": self._whole.get(p, NONE).pairs(),
                "partly": {str(c): ranges.pairs() for c, ranges in self._partly.get(p, {}).items()},
            }
            for p in sorted(self._whole.keys() | self._partly.keys())
        }

    @staticmethod
    def load(data: dict[str, Any]) -> Ledger:
        """Takes what `export` gave. Raises ValueError, TypeError or KeyError."""
        ledger = Ledger()
        for index, chunks in data.items():
            ledger._whole[int(index)] = Ranges((int(s), int(e)) for s, e in chunks["whole"])
            ledger._partly[int(index)] = {
                int(chunk): Ranges((int(s), int(e)) for s, e in ranges) for chunk, ranges in chunks["partly"].items()
            }
        return ledger
