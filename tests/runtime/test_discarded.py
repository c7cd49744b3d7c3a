"""What a launcher says at its end of records that were left out."""

from __future__ import annotations

from graphft.runtime.coordination.discarded import Discarded, describe_discarded


def test_their_numbers_are_listed_and_not_the_range_that_they_are_in() -> None:
    found = (
        Discarded(0, 5, 1, (640, 651), "ValueError: damaged"),
        Discarded(0, 6, 0, (703,), "ValueError"),
        Discarded(1, 5, 3, (640, 651), "ValueError"),
    )
    said = describe_discarded(found, 800)
    assert said.startswith(
        "3 of 800 records were DISCARDED, as their batches failed: 640, 651, 703; the first in chunk 5:"
    )
    assert "ValueError: damaged" in said
    assert "to 703" not in said


def test_of_many_the_first_are_named() -> None:
    found = (Discarded(0, 5, 1, tuple(range(640, 656)), "KeyError"),)
    assert ": 640, 641, 642, 643, 644 and 11 more; the first in chunk 5: KeyError" in describe_discarded(found, 800)
    assert describe_discarded((), 800) == ""
