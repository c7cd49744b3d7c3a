"""Time left: from the rate of the steps of late, and unknown where nothing can be said."""

import pytest

from graphft.runtime.protocol.time_ledger import StepPace, in_words


def watch(pace: StepPace, intervals: list[tuple[float, int]], total: int = 1000) -> list[float | None]:
    """`intervals`: seconds, and the steps made in them. What is left of `total` steps after each."""
    found, made = [], 0
    for seconds, steps in intervals:
        pace.train(seconds, steps)
        made += steps
        found.append(pace.left(total - made))
    return found


def test_it_is_what_is_left_at_the_rate_of_the_steps_so_far() -> None:
    # 10 steps a second; nothing is known before the first ones
    assert StepPace().left(1000) is None
    assert watch(StepPace(), [(1, 10), (9, 90)]) == [99, 90]


def test_only_the_last_minute_counts() -> None:
    pace = StepPace()
    watch(pace, [(1, 1)] * 99)
    watch(pace, [(1, 5)] * 70)
    assert pace.per_second == 5
    assert pace.left(551) == pytest.approx(551 / 5)


def test_steps_that_take_longer_than_a_minute_count_too() -> None:
    # 5 minutes a step: at a step's end, and in the middle of the next one
    assert watch(StepPace(), [(300, 1), (300, 1), (150, 0)], total=4) == pytest.approx([900, 600, 450])


def test_a_job_that_stands_still_has_ever_more_left_and_then_an_unknown_time() -> None:
    pace = StepPace()
    assert watch(pace, [(1, 10), (1, 10), (10, 0)])[-1] == pytest.approx((980 * 11 / 20) - 1)
    assert watch(pace, [(50.5, 0)]) == [None]
    assert pace.per_second == 0
    watch(pace, [(0.5, 10), (1, 10)])
    assert pace.left(960) == pytest.approx(960 * 62 / 20, rel=0.02), "the rate has the stall, for a minute"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0, "0 s"), (99, "99 s"), (100, "2 min"), (5900, "98 min"), (6000, "1 h 40 min"), (11100, "3 h 05 min")),
        *((172_800, "2 d 00 h"), (360_000, "4 d 04 h")),
    ],
)
def test_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
