"""Each step and epoch is told once over all scripts of a run, whatever callbacks they have, and however they end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.callbacks import runner as runner_module
from graphft.runtime.callbacks.callbacks import Callbacks, Run
from graphft.runtime.callbacks.runner import CallbackRunner, Cursor
from graphft.runtime.coordination.result_files import epoch_of_table
from graphft.runtime.launcher.process_ends import past_epoch
from graphft.transpiler.config import JobConfig
from tests.support.metric_rows import write_rows

SLOTS, PER_EPOCH, EPOCHS = 2, 4, 3


def config(**options: Any) -> JobConfig:
    """3 epochs of 4 steps, 2 slots with batches of 4 samples."""
    data = graphft.arrays(x=torch.zeros(32, 1), chunk_size=8)
    return JobConfig("rows", data, 4, **{"trainers": SLOTS, "epochs": EPOCHS, "ft": True, **options})


def job(**options: Any) -> Any:
    program = SimpleNamespace(attrs={"loss": "loss", "extras": ["accuracy"]})
    return SimpleNamespace(config=config(**options), run_id="0123456789abcdef", trainer_program=lambda: program)


def write(folder: Path, steps: Sequence[int]) -> None:
    write_rows(folder, map(loss_of, steps), steps[0], samples=8, accuracy=0.5)


def loss_of(step: int) -> float:
    return 1.0 / (step + 1)


class Told:
    def __init__(self, fails_at: int = -1) -> None:
        self.order: list[Any] = []
        self.fails_at = fails_at

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.fails_at:
            raise ValueError("as the test wants it")
        self.order.append(step)

    def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        self.order.append((epoch, metrics))


def runner(folder: Path, *callbacks: Any, lines: list[str] | None = None, **options: Any) -> CallbackRunner:
    return CallbackRunner(Callbacks(callbacks), job(**options), folder, (lines if lines is not None else []).append)


def metrics_in(folder: Path) -> Any:
    return lambda epoch: past_epoch(config(), folder, epoch, epoch_of_table(folder, config(), epoch - 1))


def test_a_step_whose_callback_fails_is_repeated(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    other, failing = Told(), Told(fails_at=2)
    one = runner(tmp_path, other, failing)
    with pytest.raises(ValueError, match="as the test wants it"), one:
        one.steps()
    assert (other.order, failing.order) == ([0, 1, 2], [0, 1])
    failing.fails_at = -1
    with one:
        one.steps()
    assert (other.order, failing.order) == ([0, 1, 2, 2, 3], [0, 1, 2, 3])


def test_a_missed_epoch_is_told_after_its_steps(tmp_path: Path) -> None:
    write(tmp_path, range(PER_EPOCH + 1))
    with runner(tmp_path, Told()) as one:
        one.steps()
    told = Told()
    with runner(tmp_path, told) as one:
        assert list(one.missed(1)) == [1]
        one.steps(1, metrics_in(tmp_path))
        assert list(one.missed(1)) == []
        one.epoch(1, {})
        one.steps()
    ((epoch, metrics),) = told.order
    assert epoch == 1
    assert metrics["loss"] == pytest.approx(sum(loss_of(step) * 8 for step in range(PER_EPOCH)) / 32)
    assert (metrics["samples"], metrics["discarded"], metrics["steps"]) == (32, 0, PER_EPOCH)
    again = Told()
    with runner(tmp_path, again) as one:
        assert list(one.missed(1)) == []


def test_epochs_of_a_job_are_told_between_their_steps_when_their_metrics_are_known(tmp_path: Path) -> None:
    write(tmp_path, range(2 * PER_EPOCH + 1))
    told = Told()
    with runner(tmp_path, told) as one:
        one.steps(2, lambda epoch: None)
        assert told.order == [*range(PER_EPOCH)]
        one.steps(2, metrics_in(tmp_path))
    order = [one if isinstance(one, int) else f"epoch {one[0]}" for one in told.order]
    assert order == [*range(PER_EPOCH), "epoch 1", *range(PER_EPOCH, 2 * PER_EPOCH), "epoch 2", 2 * PER_EPOCH]


def test_steps_without_rows_are_counted_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LATE_SECONDS", 0.0)
    write(tmp_path, [2])
    told, lines = Told(), list[str]()
    with runner(tmp_path, told, lines=lines) as one:
        one.steps_until(PER_EPOCH)
    assert told.order == [2]
    (line,) = lines
    assert "3 steps before step 4 could NOT be told" in line


def test_one_script_tells(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    lines = list[str]()
    first, second = Told(), Told()
    with runner(tmp_path, first) as one, runner(tmp_path, second, lines=lines) as other:
        other.steps()
        one.steps()
    assert (first.order, second.order) == ([0, 1], [])
    assert "ITS callbacks are called" in lines[0]


def test_a_callback_hears_of_the_run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "NOTE_SECONDS", 600.0)

    class Begins:
        def on_begin(self, run: Run) -> None:
            assert (run.name, run.id, run.folder) == ("rows", "0123456789abcdef", tmp_path)
            assert run.config["batch_size"] == 4
            heard.append("run")

        def on_step(self, step: int, metrics: Any) -> None:
            heard.append(step)

        def flush(self) -> None:
            heard.append("flush")

    heard: list[Any] = []
    write(tmp_path, range(2))
    one = runner(tmp_path, Begins())
    for _ in range(2):
        with one:
            one.steps()
    assert heard == ["run", 0, 1, "flush"]


def test_a_damaged_note_is_an_error(tmp_path: Path) -> None:
    note = tmp_path / "callbacks.json"
    Cursor("0123456789abcdef", 3, 1).write(tmp_path)
    for text in ('{"run": 1', "[" * 100_000, note.read_text().replace("3", "4")):
        note.write_text(text)
        with pytest.raises(GraphftError) as caught, runner(tmp_path, Told()):
            pass
        assert caught.value.rule == "callbacks"
