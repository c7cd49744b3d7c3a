"""Time left: from the rate of new steps, and unknown where nothing can be said."""

import pytest

from graphft.runtime.coordination.time_left import TimeLeft, in_words


def watch(left: TimeLeft, looks: list[tuple[float, int]], total: int | None = 1000) -> list[float | None]:
    return [left.see(at, step, total) for at, step in looks]


def test_it_is_what_is_left_at_the_rate_of_the_steps_so_far() -> None:
    # 10 steps a second; nothing is known at the first look
    assert watch(TimeLeft(), [(0, 100), (1, 110), (10, 200)]) == [None, 89, 80]


def test_only_the_last_minute_counts() -> None:
    left = TimeLeft()
    watch(left, [(at, at) for at in range(100)])  # 1 step a second
    found = watch(left, [(99 + at, 99 + 5 * at) for at in range(1, 71)])[-1]  # then 5
    assert found == pytest.approx((1000 - 449) / 5)


def test_steps_that_take_longer_than_a_minute_count_too() -> None:
    # 5 minutes a step: at a step's end, and in the middle of the next one
    assert watch(TimeLeft(), [(0, 1), (300, 2), (600, 3), (750, 3)], total=5) == [None, 900, 600, 450]


def test_repeated_steps_are_not_new_ones() -> None:
    left = TimeLeft()
    assert watch(left, [(0, 100), (10, 200), (11, 150)]) == [None, 80, None]  # a fault: back to the checkpoint
    assert watch(left, [(12, 190), (13, 200), (14, 210)]) == [None, None, 79]


def test_a_job_that_stands_still_has_ever_more_left_and_then_an_unknown_time() -> None:
    left = TimeLeft()
    watch(left, [(0, 0), (1, 10), (2, 20)])
    assert watch(left, [(12, 20)])[0] == pytest.approx((980 * 11 / 20) - 1)
    assert left.see(62.5, 20, 1000) is None
    assert watch(left, [(63, 30), (64, 40)])[-1] == pytest.approx(960 * 62 / 20), "the rate has the stall, for a minute"


def test_without_a_last_step_it_is_unknown_and_at_the_last_step_none_is_left() -> None:
    assert watch(TimeLeft(), [(0, 1), (1, 2)], total=None) == [None, None]
    assert watch(TimeLeft(), [(0, 999), (1, 1000)]) == [None, 0]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0, "0 s"), (99, "99 s"), (100, "2 min"), (5900, "98 min"), (6000, "1 h 40 min"), (11100, "3 h 05 min")),
        *((172_800, "2 d 00 h"), (360_000, "4 d 04 h")),
    ],
)
def test_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
