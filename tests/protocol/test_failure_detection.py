"""Slots that nothing comes of, shards that answer nothing, and deaths: whose fault it is."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.runtime.protocol.failure_detection import Deaths, IdleSlots
from graphft.runtime.protocol.trainer import Silence

A, B = ("a", 10), ("b", 11)


class Round:
    """A step that stays open; looked at every quarter of a second."""

    def __init__(self, timeout: float = 10.0) -> None:
        self.idle, self.now, self.step = IdleSlots(timeout), 0.0, (0, 0)

    def wait(self, seconds: float, missing: set[int], holders: dict[int, tuple[str, int]]) -> list[int]:
        """Returns what is taken away first within this time."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            if taken := self.idle.look(self.now, self.step, missing, holders):
                return taken
        return []


def test_a_slot_that_nothing_comes_of_is_taken_when_the_others_wait() -> None:
    open_round = Round()
    assert open_round.wait(9, {1}, {0: A, 1: B}) == []
    assert open_round.wait(3, {1}, {0: A, 1: B}) == [1]
    assert Round().wait(100, {0, 1}, {0: A, 1: B}) == [], "a shard that comes back slowly holds all of them up"
    assert Round().wait(11, {0, 1}, {0: A, 1: A}) == [0, 1], "one that holds every slot is not excused"
    assert Round().wait(100, {1}, {0: A}) == [], "a slot that nobody holds"


def test_the_time_of_a_holder_begins_anew() -> None:
    open_round, holders = Round(), {0: A, 1: B, 2: B}
    assert open_round.wait(8, {1, 2}, holders) == []
    open_round.idle.heard.add(1)
    assert open_round.wait(8, {2}, holders) == [], "a part of another slot came of it"
    holders |= {2: ("b", 12)}
    assert open_round.wait(8, {2}, holders) == [], "it was claimed again"
    open_round.step = (0, 1)
    assert open_round.wait(8, {2}, holders) == [], "the next step"
    open_round.now += 1000
    assert open_round.wait(0.5, {2}, holders) == [], "the shard did not look"
    assert open_round.wait(4, {2}, holders) == [2]


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
