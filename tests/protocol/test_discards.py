"""Which records, batches and samples a chunk lacks in which pass."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from graphft.plan import Plan
from graphft.runtime.protocol.discards import MAX_RECORD, ChunkDiscards, Discard, Discards, count_records

PLAN = Plan([10, 7], slots=1, batch_size=4, seed=3, passes=3)


def positions(pass_index: int, batch: int, chunk: int = 0) -> set[int]:
    return set(PLAN.positions(pass_index, chunk, batch).tolist())


def test_a_batch_is_discarded_of_its_pass_and_its_records_of_later_ones() -> None:
    found = ChunkDiscards(PLAN, 0, Discards((Discard(1, 2, "bad"),)))
    assert found.records(0) == frozenset()
    assert found.records(1) == found.records(2) == positions(1, 2)
    assert found.batches(1) == {2}
    assert sum(found.samples(2, b) for b in range(3)) == 8


def test_the_rest_of_a_chunk() -> None:
    found = ChunkDiscards(PLAN, 0, Discards((Discard(0, 1, "bad", rest=True),)))
    assert found.batches(0) == {1, 2}
    assert found.records(0) == positions(0, 1) | positions(0, 2)


def test_single_records_leave_the_rest_of_their_batch() -> None:
    bad = sorted(positions(0, 0))[:1]
    found = ChunkDiscards(PLAN, 0, Discards((Discard(0, 0, "bad", records=tuple(bad)),)))
    assert (found.samples(0, 0), found.batches(0)) == (3, frozenset())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=6))
def test_each_record_is_counted_once(discards: list[tuple[int, int, bool]]) -> None:
    made = Discards(tuple(Discard(p, b, "bad", rest=rest) for p, b, rest in discards))
    by_hand = set[int]()
    for p, b, rest in discards:
        by_hand |= set().union(*(positions(p, each, 1) for each in range(b, 2 if rest else b + 1)))
    assert count_records(PLAN, {1: made}) == len(by_hand)


def test_thousands_of_long_reasons_fit_into_a_record() -> None:
    """A chunk whose every batch is bad, each for a reason of its own."""
    found = Discards()
    for batch in range(4000):
        found = found.having(Discard(0, batch, f"batch {batch} " + "x" * 1900))
    assert len(msgspec.json.encode(found)) < MAX_RECORD
    assert found.discards[0].reason.endswith("x" * 1900)
    assert all(discard.reason.startswith(f"batch {discard.batch} ") for discard in found.discards)
    assert found.without_reasons().discards[7] == Discard(0, 7, "")
