"""A Trainer finds the newest checkpoint of a run that another process trains, and prunes, meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphft.errors import GraphftError
from graphft.runtime.driver import running_job
from graphft.runtime.driver.running_job import NewestCheckpoint


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    monkeypatch.setattr(running_job, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(running_job, "read_saved_step", lambda *of: steps.pop(0) if len(steps) > 1 else steps[0])
    monkeypatch.setattr(running_job, "was_saved", lambda job_dir: True)
    monkeypatch.setattr(running_job, "note_saved", lambda job_dir, step: True)
    return steps


@pytest.fixture
def checkpoint(tmp_path: Path) -> NewestCheckpoint:
    job: Any = SimpleNamespace(config=None)
    return NewestCheckpoint(job, tmp_path)


def test_what_is_replaced_while_it_is_looked_at_is_looked_for_again(
    found: list[int], checkpoint: NewestCheckpoint
) -> None:
    found += [0, 0, 6]
    assert checkpoint.step(None) == 6
    found[:] = [0, 4, 18]
    assert checkpoint.step(None) == 18


def test_what_stays_away_is_gone(found: list[int], checkpoint: NewestCheckpoint) -> None:
    found += [0]
    with pytest.raises(GraphftError, match="was there when it was trained last is gone, or damaged"):
        checkpoint.step(None)
    found[:] = [12]
    assert checkpoint.step(None) == 12
    for step, what in (0, "of step 12 is gone, or damaged: .* holds no"), (6, "holds one of step 6"):
        found[:] = [step]
        with pytest.raises(GraphftError, match=what):
            checkpoint.step(None)
    found[:] = [12]
    assert checkpoint.step(None) == 12
