"""A launcher whose etcd has lost its data waits for the job's processes to record the job again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from graphft.errors import GraphftError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import supervise
from graphft.runtime.launcher.supervise import LOST_SECONDS, _Look

KNOWN = cast("JobStatus", object())


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervise, "time", clock)
    return clock


def test_what_was_known_stays_until_it_is_recorded_again(
    etcd: Etcd, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = _Look(etcd, Keys("lost"), 0)
    with pytest.raises(GraphftError, match="etcd knows no job named lost"):
        look(None)  # it was never there

    def recorded(*_: Any, **__: Any) -> JobStatus:
        return KNOWN

    for _ in range(2):
        assert look(KNOWN) is KNOWN
        clock.now += LOST_SECONDS - 1
        assert look(KNOWN) is KNOWN
        monkeypatch.setattr(supervise, "read_status", recorded)
        assert look(None) is KNOWN  # and what comes after that counts from then
        monkeypatch.setattr(supervise, "read_status", read_status)
        clock.now += 5
    assert look(KNOWN) is KNOWN
    clock.now += LOST_SECONDS + 1
    with pytest.raises(GraphftError, match="etcd has lost the records of job lost") as caught:
        look(KNOWN)
    assert "it goes on from its newest checkpoint" in caught.value.help
