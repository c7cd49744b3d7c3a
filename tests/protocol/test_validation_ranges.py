"""Ranges of a validation: each counts once, whoever computes it, and they add up in one order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from graphft.runtime.protocol import validation_ranges as ranges
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.validation_ranges import MOST_CLAIMS, RangeClaim, RangeRecord

PREFIX = "/job.validation/7/"


@dataclass
class Entry:
    value: bytes
    create_revision: int
    mod_revision: int


class Book:
    """What etcd does with changes. `die`: the leased records of one holder go."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0

    def apply(self, change: Change) -> int:
        """The revision; 0 if a compare does not hold."""
        for c in change.compares:
            entry = self.entries.get(c.key)
            found = 0 if entry is None else entry.mod_revision if c.target == "mod" else entry.create_revision
            if found != c.revision:
                return 0
        self.revision += 1
        for key in change.deletes:
            self.entries.pop(key, None)
        for put in change.puts:
            before = self.entries.get(put.key)
            created = before.create_revision if before is not None else self.revision
            self.entries[put.key] = Entry(put.value, created, self.revision)
        return self.revision

    def record(self, number: int) -> Entry | None:
        return self.entries.get(ranges.range_key(PREFIX, number))

    def held(self, number: int) -> Entry | None:
        return self.entries.get(ranges.claim_key(PREFIX, number))

    def claim(self, number: int, trainer: str, stale: bool = False) -> int:
        held = self.held(number)
        if stale:
            assert held is not None
            assert self.apply(ranges.expire(PREFIX, number, held))
        change = ranges.claim(PREFIX, number, self.record(number), trainer, 3)
        assert isinstance(change, Change)
        return self.apply(change)


def test_one_holds_a_range() -> None:
    book = Book()
    fence = book.claim(0, "a")
    assert fence
    assert not book.claim(0, "b")
    assert book.apply(ranges.renew(PREFIX, 0, fence, RangeClaim("a", 1, 2)))
    assert book.claim(0, "b", stale=True), "it has not got on for too long"
    assert not book.apply(ranges.renew(PREFIX, 0, fence, RangeClaim("a", 1, 3)))


def test_the_first_who_computes_a_range_decides() -> None:
    book = Book()
    book.claim(0, "a")
    book.claim(0, "b", stale=True)
    first = ranges.complete(PREFIX, 0, book.record(0), 4, [1.5])
    late = ranges.complete(PREFIX, 0, book.record(0), 4, [9.5])
    assert first is not None
    assert late is not None
    assert book.apply(first)
    assert not book.apply(late)
    assert ranges.complete(PREFIX, 0, book.record(0), 4, [9.5]) is None
    assert ranges.decode_range(book.record(0)).sums == ("1.5",)
    assert book.held(0) is None


def test_failures_count_and_departures_do_not() -> None:
    book = Book()
    for failed in (True, False, True, True):
        fence = book.claim(0, "a")
        change = ranges.release(PREFIX, 0, book.record(0), fence, "bad" * failed)
        assert change is not None
        assert book.apply(change)
    assert ranges.decode_range(book.record(0)) == RangeRecord(3, 3, "bad")
    refused = ranges.claim(PREFIX, 0, book.record(0), "a", 3)
    assert refused == "3 of 3 that tried have failed; the last failure: bad"


def test_a_range_whose_holders_vanish_is_given_up_at_last() -> None:
    book = Book()
    for _ in range(MOST_CLAIMS):
        assert book.claim(0, "a")
        del book.entries[ranges.claim_key(PREFIX, 0)]
    refused = ranges.claim(PREFIX, 0, book.record(0), "a", 3)
    assert refused == f"0 of {MOST_CLAIMS} that tried have failed, and {MOST_CLAIMS} vanished"


def test_a_computed_range_is_not_given_back() -> None:
    book = Book()
    fence = book.claim(0, "a")
    done = ranges.complete(PREFIX, 0, book.record(0), 4, [1.0])
    assert done is not None
    book.apply(done)
    assert ranges.release(PREFIX, 0, book.record(0), fence, "bad") is None


def test_totals_are_means_over_all_samples_in_the_order_of_the_ranges() -> None:
    records = {1: RangeRecord(samples=1, sums=("0.3",)), 0: RangeRecord(samples=3, sums=("0.1",))}
    assert ranges.totals(records, 2) == (4, ((0.0 + 0.1 + 0.3) / 4,))
    assert ranges.totals(records, 3) is None


@given(st.lists(st.floats(), min_size=1, max_size=5), st.integers(1, 9))
def test_sums_are_kept_to_the_bit(values: list[float], samples: int) -> None:
    record = RangeRecord(samples=samples, sums=ranges.sums_as_text(values))
    read = msgspec.json.decode(msgspec.json.encode(record), type=RangeRecord)
    assert [math.copysign(1, float(s)) for s in read.sums] == [math.copysign(1, v) for v in map(float, record.sums)]
    assert [repr(float(s)) for s in read.sums] == [repr(v) for v in values]


@given(st.permutations(range(4)), st.lists(st.floats(-1e9, 1e9), min_size=4, max_size=4))
def test_the_order_in_which_ranges_are_computed_does_not_matter(order: list[int], sums: list[float]) -> None:
    done = {number: RangeRecord(samples=2, sums=ranges.sums_as_text([sums[number]])) for number in order}
    assert ranges.totals(done, 4) == ranges.totals(dict(sorted(done.items())), 4)
