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
            taken = self.idle.look(self.now, self.step, missing, holders)
            if taken:
                return taken
        return []


def test_a_slot_that_nothing_comes_of_is_taken_when_the_others_wait() -> None:
    open_round = Round()
    assert open_round.wait(9, {1}, {0: A, 1: B}) == []
    assert open_round.wait(3, {1}, {0: A, 1: B}) == [1]


def test_nothing_is_taken_while_nobody_has_contributed() -> None:
    assert Round().wait(100, {0, 1}, {0: A, 1: B}) == []


def test_a_trainer_that_holds_every_slot_is_not_excused() -> None:
    assert Round().wait(11, {0, 1}, {0: A, 1: A}) == [0, 1]


def test_a_trainer_of_several_slots_has_time_for_each() -> None:
    open_round, holders = Round(), {0: A, 1: B, 2: B}
    assert open_round.wait(8, {1, 2}, holders) == []
    open_round.idle.heard(1)
    assert open_round.wait(8, {2}, holders) == []
    assert open_round.wait(4, {2}, holders) == [2]


def test_a_new_holder_and_a_new_step_begin_anew() -> None:
    open_round = Round()
    assert open_round.wait(8, {1}, {0: A, 1: B}) == []
    assert open_round.wait(8, {1}, {0: A, 1: ("b", 12)}) == [], "it was claimed again"
    open_round.step = (0, 1)
    assert open_round.wait(8, {1}, {0: A, 1: ("b", 12)}) == []


def test_time_in_which_the_shard_did_not_look_does_not_count() -> None:
    open_round = Round()
    assert open_round.wait(8, {1}, {0: A, 1: B}) == []
    open_round.now += 1000
    assert open_round.wait(0.5, {1}, {0: A, 1: B}) == []


def test_a_slot_that_nobody_holds_is_nobodys_to_lose() -> None:
    assert Round().wait(100, {1}, {0: A}) == []


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
