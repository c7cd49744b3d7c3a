"""Which failure a call that bears no more of them names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphft.runtime.driver.retries import Retries, WorkerFailed
from graphft.runtime.launcher.child import Child


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
