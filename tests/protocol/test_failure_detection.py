"""Slots that nothing comes of, shards that answer nothing, and deaths: whose fault it is."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.runtime.protocol.failure_detection import Deaths
from graphft.runtime.protocol.trainer import Silence


def test_a_shard_that_answers_nothing_is_silent_as_long_as_its_trainer_listens() -> None:
    silence = Silence(2)
    silence.look(0.0)
    silence.asked(1)
    for now in (0.5, 1.0, 1.5):
        silence.look(now)
    assert silence.over(1.4) == (1,)
    assert silence.over(1.6) == ()
    silence.look(61.5)  # it has computed for a minute, and takes in what came meanwhile
    assert silence.over(3.0) == ()
    silence.heard(1)
    silence.look(62.0)
    assert silence.over(0.0) == ()


# -- deaths ------------------------------------------------------------------------------------------------------------

KILL, SEGV, TERM = "killed", "crashed", "asked"
ONE, TWO, THREE = (0, 3, 1), (0, 3, 2), (1, 0, 0)
Story = list[tuple[Any, set[tuple[int, int, int]]]]


def fatal(story: Story) -> list[int]:
    """Numbers of the deaths that are failures of the batch."""
    deaths = Deaths()
    return [i for i, (how, at) in enumerate(story) if deaths.blames(how, frozenset(at))]


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ([(SEGV, {ONE})], [0]),
        ([(SEGV, {ONE}), (SEGV, {ONE})], [0, 1]),
        ([(KILL, {ONE})] * 5, [2, 3, 4]),
        ([(KILL, {ONE}), (KILL, {TWO})] * 5, []),
        ([(KILL, {ONE}), (KILL, {ONE}), (KILL, set()), (KILL, {ONE}), (KILL, {ONE})], []),  # a pserver died in between
        ([(KILL, {ONE}), (KILL, {ONE}), (TERM, {ONE}), (KILL, {ONE})], []),
        ([(TERM, {ONE})] * 9, []),
        ([(KILL, set())] * 9, []),  # while they waited for others
        ([(SEGV, set())] * 9, []),  # it has said itself what failed
        ([(SEGV, {ONE, TWO})] * 4, []),  # which of the two?
        ([(SEGV, {ONE, TWO}), (SEGV, {TWO})], [1]),
        ([(KILL, {ONE, TWO}), (KILL, {TWO, THREE}), (KILL, {TWO})], [2]),
        ([(KILL, {ONE, TWO}), (KILL, {THREE}), (KILL, {THREE}), (KILL, {THREE})], [3]),
    ],
)
def test_whose_fault_it_is(story: Story, expected: list[int]) -> None:
    assert fatal(story) == expected
