"""Each step and epoch is told once over all scripts of a run, whatever callbacks they have, and however they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from graphft.errors import GraphftError
from graphft.runtime.callbacks import teller as teller_module
from graphft.runtime.callbacks.callbacks import Callbacks, Run
from graphft.runtime.callbacks.epoch_sums import EpochSums
from graphft.runtime.callbacks.teller import Teller
from graphft.runtime.launcher.process_ends import past_epoch
from graphft.runtime.process.metric_table import Row
from tests.callbacks.rows import PER_EPOCH, append, config, job, loss_of, row


class Steps:
    def __init__(self, fails_at: int = -1) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.fails_at = fails_at

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.fails_at:
            raise ValueError("as the test wants it")
        self.told.append((step, metrics))

    @property
    def numbers(self) -> list[int]:
        return [step for step, _ in self.told]


class Epochs(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[Any] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.order.append(step)

    def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        self.order.append((epoch, metrics))


def teller(folder: Path, *callbacks: Any, lines: list[str] | None = None, **options: Any) -> Teller:
    return Teller(Callbacks(callbacks), job(**options), folder, (lines if lines is not None else []).append)


def write(folder: Path, steps: Sequence[int]) -> None:
    append(folder, "a", [row(step, slot) for step in steps for slot in (0, 1)])


def ended(folder: Path) -> Any:
    return lambda sums: past_epoch(config(), folder, sums)


def test_values_are_means_over_the_samples(tmp_path: Path) -> None:
    append(tmp_path, "a", [row(0, 0, samples=1, loss=4.0), row(0, 1, samples=3, loss=8.0)])
    told = Steps()
    with teller(tmp_path, told) as one:
        one.steps()
    assert told.told == [(0, {"loss": 7.0, "accuracy": 0.0})]


def test_the_next_script_goes_on_behind_what_was_told(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    first, second = Steps(), Steps()
    with teller(tmp_path, first) as one:
        one.steps()
    write(tmp_path, range(1, 5))
    with teller(tmp_path, second) as one:
        one.steps()
    assert (first.numbers, second.numbers) == ([0, 1, 2], [3, 4])
    assert [metrics["loss"] for _, metrics in second.told] == [loss_of(3), loss_of(4)]


def test_of_a_callback_that_fails_the_step_is_told_again(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    other, failing = Steps(), Steps(fails_at=2)
    one = teller(tmp_path, other, failing)
    with pytest.raises(ValueError, match="as the test wants it"), one:
        one.steps()
    assert (other.numbers, failing.numbers) == ([0, 1, 2], [0, 1])
    failing.fails_at = -1
    with one:
        one.steps()
    assert (other.numbers, failing.numbers) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_what_a_callback_does_not_hold_is_told_again(tmp_path: Path) -> None:
    """A logger of its own file, which is new, or has lost its end; the others are not told twice."""

    class Logger(Steps):
        def held(self) -> tuple[int, int]:
            return 1, 0

    write(tmp_path, range(3))
    with teller(tmp_path, Steps()) as one:
        one.steps()
    logger, plain = Logger(), Steps()
    write(tmp_path, [3])
    with teller(tmp_path, logger, plain) as one:
        one.steps()
    assert (logger.numbers, plain.numbers) == ([1, 2, 3], [3])
    last = Steps()
    with teller(tmp_path, last) as one:
        one.steps()
    assert last.numbers == []


def test_a_missed_epoch_is_told_after_its_steps(tmp_path: Path) -> None:
    write(tmp_path, range(PER_EPOCH + 1))
    with teller(tmp_path, Steps()) as one:
        one.steps()
    told, steps = Epochs(), range(PER_EPOCH)
    with teller(tmp_path, told) as one:
        assert list(one.missed(1)) == [1]
        one.catch_up(1, ended(tmp_path))
        assert list(one.missed(1)) == []
        one.epoch(1, {})
        one.steps()
    ((epoch, metrics),) = told.order
    assert epoch == 1
    total = 0.0
    for step in steps:
        for slot in (0, 1):
            total += row(step, slot)["loss"] * 4
    assert metrics["loss"] == total / 32
    assert (metrics["samples"], metrics["discarded"], metrics["steps"], metrics["seconds"]) == (32, 0, PER_EPOCH, 3.0)
    again = Epochs()
    with teller(tmp_path, again) as one:
        assert list(one.missed(1)) == []


def test_epochs_of_a_job_are_told_between_their_steps(tmp_path: Path) -> None:
    write(tmp_path, range(2 * PER_EPOCH + 1))
    told = Epochs()
    with teller(tmp_path, told) as one:
        one.steps(0, ended(tmp_path))
    order = [one if isinstance(one, int) else f"epoch {one[0]}" for one in told.order]
    assert order == [*range(PER_EPOCH), "epoch 1", *range(PER_EPOCH, 2 * PER_EPOCH), "epoch 2", 2 * PER_EPOCH]


def test_steps_without_rows_are_counted_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphft.runtime.callbacks.teller.LATE_SECONDS", 0.0)
    append(tmp_path, "a", [row(0, 0), row(0, 1), row(1, 0), row(3, 0), row(3, 1)])
    told, lines = Steps(), list[str]()
    with teller(tmp_path, told, lines=lines) as one:
        one.steps_until(PER_EPOCH)
    assert told.numbers == [0, 1, 3]
    (line,) = lines
    assert "between steps 1 and 2, 1 were told WITHOUT the rows of some slots and 1 could NOT be told" in line


def test_one_script_tells(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    lines = list[str]()
    first, second = Steps(), Steps()
    with teller(tmp_path, first) as one, teller(tmp_path, second, lines=lines) as other:
        other.steps()
        one.steps()
    assert (first.numbers, second.numbers) == ([0, 1], [])
    assert "ITS callbacks are told" in lines[0]


def test_a_callback_hears_of_the_run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teller_module, "NOTE_SECONDS", 600.0)

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
    one = teller(tmp_path, Begins())
    for _ in range(2):
        with one:
            one.steps()
    assert heard == ["run", 0, 1, "flush"]


def test_a_callback_that_cannot_begin_is_asked_again(tmp_path: Path) -> None:
    class Away(Steps):
        def on_begin(self, run: Run) -> None:
            if away:
                raise ConnectionError("no server")

    away, told = True, Away()
    write(tmp_path, range(2))
    one = teller(tmp_path, told)
    with pytest.raises(ConnectionError), one:
        pass
    away = False
    with one:
        one.steps()
    assert told.numbers == [0, 1]


def test_a_damaged_note_is_an_error(tmp_path: Path) -> None:
    note, run = tmp_path / "callbacks.json", '"run": "0123456789abcdef", "epoch"'
    numbers = [(1, "1e999"), (0, "13"), (-1, "0")]
    for text in ('{"run": 1', "[" * 100_000, *(f'{{{run}: {epoch}, "step": {step}}}' for epoch, step in numbers)):
        note.write_text(text)
        with pytest.raises(GraphftError, match="does not say what callbacks were told"), teller(tmp_path, Steps()):
            pass
    note.unlink()
    note.mkdir()
    with pytest.raises(GraphftError, match="does not say what callbacks were told"), teller(tmp_path, Steps()):
        pass
    note.rmdir()
    (tmp_path / "callbacks.lock").unlink()
    (tmp_path / "callbacks.lock").mkdir()
    with pytest.raises(GraphftError, match="is to be a file, to be locked"), teller(tmp_path, Steps()):
        pass


def test_an_epoch_without_rows_has_a_loss_all_the_same(tmp_path: Path) -> None:
    told = Epochs()
    with teller(tmp_path, told) as one:
        one.steps(PER_EPOCH, ended(tmp_path))
    ((epoch, metrics),) = told.order
    assert (epoch, str(metrics["loss"]), str(metrics["accuracy"]), metrics["discarded"]) == (1, "nan", "nan", 32)


def test_a_skipped_step_is_no_part_of_its_epoch() -> None:
    sums = EpochSums(1, 2)
    sums.add([Row(0, slot, 4, 100.0, {"loss": loss}) for slot, loss in enumerate((math.nan, 1.0))], 0, skips=True)
    sums.add([Row(1, slot, 4, 101.0, {"loss": loss}) for slot, loss in enumerate((2.0, 4.0))], 0, skips=True)
    assert (sums.samples, sums.means["loss"]) == (8, 3.0)
