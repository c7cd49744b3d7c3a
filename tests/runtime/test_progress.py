"""The marks of a main thread, and what a look at them counts."""

from __future__ import annotations

import math

from graphft.runtime.process.progress import LOOK_SECONDS, Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def looked_at(progress: Progress, clock: Clock, seconds: float, every: float = 0.5) -> bool:
    """Returns True if it hangs after so long, the daemon thread looking all the time."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += every
        if progress.hung():
            return True
    return False


def test_a_main_thread_without_a_mark_hangs_when_its_limit_is_over() -> None:
    clock = Clock()
    progress = Progress(10.0, clock)
    assert not looked_at(progress, clock, 1000.0), "the start has no limit"
    progress.begin("training")
    assert not looked_at(progress, clock, 9.0)
    assert progress.left() <= 1.5
    progress.beat()
    assert not looked_at(progress, clock, 9.0)
    assert looked_at(progress, clock, 2.0)


def test_what_may_take_longer_has_a_limit_of_its_own() -> None:
    clock = Clock()
    progress = Progress(10.0, clock)
    progress.begin("training")
    with progress.within(math.inf, "loading data"):
        assert progress.doing == "loading data"
        assert not looked_at(progress, clock, 1000.0)
    assert (progress.doing, progress.limit) == ("training", 10.0)
    assert not looked_at(progress, clock, 9.0), "the usual limit counts from the end of it"
    assert looked_at(progress, clock, 2.0)


def test_the_time_in_which_the_whole_process_was_stopped_does_not_count() -> None:
    clock = Clock()
    progress = Progress(10.0, clock)
    progress.begin("training")
    assert not looked_at(progress, clock, 5.0)
    clock.now += 3600
    assert not progress.hung(), "the daemon thread did not run either"
    assert progress.idle() <= 5.0 + LOOK_SECONDS
    assert looked_at(progress, clock, 10.0)
