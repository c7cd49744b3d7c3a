"""Steps come in their order, each once, however their rows are written, and none is waited for that never comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.runtime.callbacks import step_rows
from graphft.runtime.callbacks.step_rows import StepRows
from tests.callbacks.rows import EPOCHS, PER_EPOCH, append, plan, row


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def numbers(rows: StepRows, over: int = 0) -> list[tuple[int, int]]:
    return [(step.number, step.lacking) for step in rows.steps(over)]


def test_a_step_is_ready_when_all_of_its_slots_are_there(tmp_path: Path) -> None:
    rows = StepRows(tmp_path, plan(), 0)
    assert numbers(rows) == []
    append(tmp_path, "a", [row(0, 0), row(1, 0)])
    assert numbers(rows) == []
    append(tmp_path, "b", [row(1, 1), row(2, 1)])
    assert numbers(rows) == []
    append(tmp_path, "c", [row(0, 1)])
    assert numbers(rows) == [(0, 0), (1, 0)]
    append(tmp_path, "a", [row(2, 0)])
    assert numbers(rows) == [(2, 0)]


def test_a_line_that_is_not_whole_is_read_later(tmp_path: Path) -> None:
    rows = StepRows(tmp_path, plan(), 0)
    append(tmp_path, "a", [row(0, 0)], end='{"step": 0, "slot": 1, "loss": 0.5, ')
    assert numbers(rows) == []
    append(tmp_path, "a", [], end='"samples": 4}\nnonsense\n[1]\n')
    assert numbers(rows) == [(0, 0)]


def test_what_is_computed_again_is_not_told_again(tmp_path: Path) -> None:
    rows = StepRows(tmp_path, plan(), 0)
    append(tmp_path, "a", [row(step, slot) for step in range(3) for slot in (0, 1)])
    assert numbers(rows) == [(0, 0), (1, 0), (2, 0)]
    append(tmp_path, "b", [row(step, slot) for step in range(5) for slot in (0, 1)])
    assert numbers(rows) == [(3, 0), (4, 0)]


def test_who_goes_on_begins_where_it_was(tmp_path: Path) -> None:
    append(tmp_path, "a", [row(step, slot) for step in range(6) for slot in (0, 1)])
    assert numbers(StepRows(tmp_path, plan(), 4)) == [(4, 0), (5, 0)]


def test_lost_rows_are_given_up_some_seconds_after_later_ones(tmp_path: Path) -> None:
    clock = Clock()
    rows = StepRows(tmp_path, plan(), 0, clock=clock)
    lost = {(1, 0), (2, 0), (2, 1), (4, 1)}
    append(tmp_path, "a", [row(s, v) for s in range(5) for v in (0, 1) if (s, v) not in lost])
    assert numbers(rows) == [(0, 0)]
    clock.now += step_rows.PATIENCE_SECONDS - 0.1
    assert numbers(rows) == []
    clock.now += 0.2
    assert numbers(rows) == [(1, 1), (2, 2), (3, 0)], "of step 4 nobody knows that it is done"
    assert numbers(rows, over=5) == [(4, 1)]


def test_async_nothing_is_given_up_before_its_pass_is_over(tmp_path: Path) -> None:
    clock = Clock()
    rows = StepRows(tmp_path, plan(), 0, patience=float("inf"), clock=clock)
    append(tmp_path, "a", [row(1, 0), row(1, 1)])
    assert numbers(rows) == []
    clock.now += 1e9
    assert numbers(rows) == []
    assert numbers(rows, over=PER_EPOCH) == [(0, 2), (1, 0), (2, 2), (3, 2)]


def test_steps_end_with_the_job(tmp_path: Path) -> None:
    rows, total = StepRows(tmp_path, plan(), 0), EPOCHS * PER_EPOCH
    assert len(numbers(rows, over=total + 50)) == total


def test_no_more_rows_are_held_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is far ahead is read on when the others get there, and does not wait for rows that are lost."""
    monkeypatch.setattr(step_rows, "PIECE", 200)
    long = plan()
    long.passes = 1000
    for trainer, slot, steps in (("a", 0, range(4000)), ("b", 1, range(2000)), ("c", 1, range(2010, 4000))):
        append(tmp_path, trainer, [row(step, slot) for step in steps])
    rows = StepRows(tmp_path, long, 0, clock=lambda: 0.0)  # a machine that is loaded takes longer than a look may
    rows._ahead, found, most = 100, [], 0
    for step in rows.steps(3000):
        found.append(step)
        most = max(most, len(rows._steps))
    assert [step.number for step in found] == list(range(4000))
    assert [step.number for step in found if step.lacking] == list(range(2000, 2010))
    assert most < 250
