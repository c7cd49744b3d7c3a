"""Which deaths are a batch's fault: stories of processes that die."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.runtime.protocol.failure_detection import Deaths, Died

KILL, SEGV, TERM = "killed", "crashed", "asked"
A, B, C = (0, 3, 1), (0, 3, 2), (1, 0, 0)
Story = list[tuple[Any, set[tuple[int, int, int]]]]


def fatal(story: Story) -> list[int]:
    """Numbers of the deaths that are failures of the batch."""
    deaths = Deaths()
    return [i for i, (how, at) in enumerate(story) if deaths.step(Died(how, frozenset(at))).fatal]


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ([(SEGV, {A})], [0]),
        ([(SEGV, {A}), (SEGV, {A})], [0, 1]),
        ([(KILL, {A})] * 5, [2, 3, 4]),
        ([(KILL, {A}), (KILL, {B})] * 5, []),
        ([(KILL, {A}), (KILL, {A}), (KILL, set()), (KILL, {A}), (KILL, {A})], []),  # a pserver died in between
        ([(KILL, {A}), (KILL, {A}), (TERM, {A}), (KILL, {A})], []),
        ([(TERM, {A})] * 9, []),
        ([(KILL, set())] * 9, []),  # while they waited for others
        ([(SEGV, set())] * 9, []),  # it has said itself what failed
        ([(SEGV, {A, B})] * 4, []),  # which of the two?
        ([(SEGV, {A, B}), (SEGV, {B})], [1]),
        ([(KILL, {A, B}), (KILL, {B, C}), (KILL, {B})], [2]),
        ([(KILL, {A, B}), (KILL, {C}), (KILL, {C}), (KILL, {C})], [3]),
    ],
)
def test_whose_fault_it_is(story: Story, expected: list[int]) -> None:
    """A crash is a failure of its batch; SIGKILL is one from the third in a row on, if nothing else died in between."""
    assert fatal(story) == expected


def test_how_often_in_a_row() -> None:
    deaths = Deaths()
    assert [deaths.step(Died(KILL, frozenset({at}))).in_a_row for at in (A, A, B, B, B)] == [1, 2, 1, 2, 3]
