"""Which failure a call that bears no more of them names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphft.runtime.driver.retries import Retries, WorkerFailed, of_life, traceback_in
from graphft.runtime.launcher.child import Child
from graphft.runtime.process.role_process import BEGINS


def died(child: Child, how: str, at: float) -> None:
    child.death, child.died_at = f"{child.name} died ({how})", at
    child.fail(0, True, False)


def test_it_is_the_last_one_of_the_call_whatever_the_events_tell_so_far() -> None:
    """The event of a failure comes a moment after it is counted: another worker was named, with a failure long ago."""
    first, second = Child("trainer", 0), Child("trainer", 1)
    job: Any = SimpleNamespace(
        children=[first, second], events=list, logs_of=lambda child, lines: [], tail_of=lambda child: "its log"
    )
    retries = Retries(job)
    retries.most = 0
    died(first, "exit status 1", 1.0)
    with pytest.raises(WorkerFailed, match=r"trainer 0 died \(exit status 1\); workers have failed 1 times"):
        retries.check()
    retries.settle()
    retries.check()
    died(second, "exit status 3", 2.0)
    with pytest.raises(WorkerFailed, match=r"trainer 1 died \(exit status 3\); workers have failed 1 times"):
        retries.check()
    died(first, "exit status 4", 3.0)
    with pytest.raises(WorkerFailed, match=r"trainer 0 died \(exit status 4\); workers have failed 2 times"):
        retries.check()


def test_the_traceback_is_that_of_the_process_that_failed_though_its_next_life_has_begun() -> None:
    """On a busy machine the next one has written its first lines, or has failed as well, before the log is read."""

    def life(pid: int, *lines: str) -> list[str]:
        return [f"[trainer 0] {BEGINS}{pid}", *lines]

    def failure(error: str) -> list[str]:
        return ["Traceback (most recent call last):", '  File "data.py", line 3, in __getitem__', error]

    first, second = life(41, *failure("OSError: the first")), life(412, "a line", *failure("ZeroDivisionError: 412"))
    log = [*first, *second, *life(4123, "loading"), *life(4124, *failure("KeyError: a later one"))]
    assert of_life(log, 412) == second
    assert traceback_in(of_life(log, 412)).splitlines() == failure("ZeroDivisionError: 412")
    assert of_life(log, 41) == first, "41 is not the 41 of 412"
    assert traceback_in(of_life(log, 4123)) == "", "that of another process is none of this one"
    assert of_life(log, 999) == of_life(log, 4124), "it did not get so far as to say that it begins"
    assert of_life(second[1:], 412) == second[1:], "the line in which it does is above what is read"
