"""Log lines tell who and at which step; GRAPHFT_DEBUG tells how much."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from graphft.errors import UsageError
from graphft.runtime.roles.logs import BLOCKS, COUNTS, EVENTS, log, log_as, tell_event

pytestmark = pytest.mark.usefixtures("logging_restored")


def test_a_line_tells_the_step_once_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    role = SimpleNamespace(at_step=None)
    follow = log_as("trainer 1", {})
    log.info("begins")
    follow(role)
    log.info("is here")
    role.at_step = 1042
    log.info("took over slot 2")
    lines = [re.sub(r"^[\d:.]+ ", "", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == ["[trainer 1] begins", "[trainer 1] is here", "[trainer 1 step 1042] took over slot 2"]


@pytest.mark.parametrize(("level", "said"), [("", 0), ("0", 0), ("1", 1), ("2", 2), ("3", 3)])
def test_each_level_says_more(level: str, said: int, capsys: pytest.CaptureFixture[str]) -> None:
    log_as("pserver 0", {"GRAPHFT_DEBUG": level})
    log.log(COUNTS, "a push is refused")
    log.log(BLOCKS, "block step took 3 ms")
    tell_event("Tick()", ["Send()", "Count()"])
    assert len(capsys.readouterr().err.splitlines()) == said
    assert log.isEnabledFor(EVENTS) == (said == 3)


def test_another_level_is_an_error() -> None:
    for text in ("much", "4", "-1"):
        with pytest.raises(UsageError, match=r"^error\[environment\]"):
            log_as("trainer 0", {"GRAPHFT_DEBUG": text})
