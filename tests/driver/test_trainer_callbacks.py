"""What a Trainer's callbacks hear, what they find, and what becomes of a call that they end."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

import graphft
from graphft.runtime.driver import trainer as trainer_module
from tests.driver import epochs
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


def test_events_are_told_up_to_now_and_stay(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listener:
        def on_event(self, event: Any) -> None:
            heard.append(event.text)

    with epochs.trainer(tmp_path / "job", callbacks=[Listener()]) as trainer:
        trainer.train()
        assert trainer.signal("pserver", 1, signal.SIGKILL)
        until(lambda: any("pserver 1 died" in event.text for event in trainer.events()))
        assert trainer.train()["preemptions"] == 1, "one of a pause"
    assert any("pserver 1 died" in event.text for event in trainer.events())
    assert sum("pserver 1 died" in text for text in heard) == 1
    heard.clear()
    with epochs.trainer(tmp_path / "job", callbacks=[Listener()]) as trainer:
        trainer.train()
        assert any("pserver 1 died" in event.text for event in trainer.events())
    assert heard
    assert not any("pserver 1 died" in text for text in heard), "an earlier script was told"


def test_a_callback_that_shuts_down_ends_the_call(tmp_path: Path) -> None:
    class Stops:
        def on_status(self, status: Any) -> None:
            trainer.shutdown()

    trainer = epochs.trainer(tmp_path / "job", callbacks=[Stops()])
    with pytest.raises(graphft.GraphftError, match="was shut down while it trained"):
        trainer.train(epochs=500)  # one may be done before its status is seen


def test_an_epoch_whose_job_was_shut_down_is_not_told_without_its_metrics(tmp_path: Path) -> None:
    """Its last step was done when a callback shut the job down: it was told with a loss of nan, and never again."""

    class Stops:
        told: ClassVar[list[float]] = []

        def on_status(self, status: Any) -> None:
            if (running := trainer._running) is not None:
                until(lambda: running.status is not None and running.status.step >= epochs.PER_EPOCH)
                trainer.shutdown()

        def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
            self.told.append(metrics["loss"])

    trainer = epochs.trainer(tmp_path / "job", callbacks=[Stops()])
    with pytest.raises(graphft.GraphftError, match="was shut down while it trained"):
        trainer.train(checkpoint=None)
    assert not Stops.told
    found: dict[int, float] = {}

    class Hears:
        def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
            found[epoch] = metrics["loss"]

    with epochs.trainer(tmp_path / "job", callbacks=[Hears()]) as trainer:
        trainer.train(epochs=2)
    assert math.isfinite(found[1])
    assert math.isfinite(found[2])


def test_a_callback_finds_the_state_of_its_epoch(tmp_path: Path) -> None:
    found: dict[int, Any] = {}

    class Looks:
        def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
            state = trainer.state_dict()
            found[epoch] = state["epoch"], state["step"], trainer.epoch

    with epochs.trainer(tmp_path / "job", callbacks=[Looks()]) as trainer:
        trainer.train(epochs=3)
    assert found == {n: (n, n * epochs.PER_EPOCH, n) for n in (1, 2, 3)}


def test_a_callback_that_shuts_down_between_two_epochs_ends_the_call(tmp_path: Path) -> None:
    class Stops:
        def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
            trainer.shutdown()

    trainer = epochs.trainer(tmp_path / "job", callbacks=[Stops()])
    with pytest.raises(graphft.GraphftError, match="was shut down while it trained"):
        trainer.train(epochs=2)


def test_what_an_interrupted_call_wanted_is_not_trained(tmp_path: Path) -> None:
    class Interrupts:
        def on_status(self, status: Any) -> None:
            if first and status.step > epochs.PER_EPOCH:
                raise KeyboardInterrupt

    first = True
    with epochs.trainer(tmp_path / "job", callbacks=[Interrupts()]) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(epochs=500)
        first = False
        done = trainer.epoch
        assert trainer.at_epoch_end is (trainer.state_dict()["step"] == done * epochs.PER_EPOCH)
        assert trainer.train()["epoch"] == done + 1
        time.sleep(2.0)  # for what goes on unasked
        assert trainer.epoch == trainer.state_dict()["epoch"] == done + 1


def test_a_callback_that_fails_ends_the_processes(tmp_path: Path) -> None:
    class Failing:
        def on_epoch(self, epoch: int, metrics: Any) -> None:
            raise ValueError("as the test wants it")

    trainer = epochs.trainer(tmp_path / "job", callbacks=[Failing()])
    with pytest.raises(ValueError, match="as the test wants it"):
        trainer.train()
    assert not trainer.workers()
    assert trainer.epoch == 1


def test_epochs_of_one_call_are_told_one_by_one(tmp_path: Path) -> None:
    told: list[Any] = []

    class Listener:
        def on_epoch(self, epoch: int, metrics: Any) -> None:
            told.append((epoch, metrics["epoch"], metrics["samples"], metrics["steps"], metrics["loss"]))

    with epochs.trainer(tmp_path / "job", callbacks=[Listener()]) as trainer:
        last = trainer.train(epochs=3)
        assert trainer.signal("trainer", 0, signal.SIGKILL)
        until(lambda: any(event.kind == "died" for event in trainer.events()))
        assert trainer.train(epochs=2)["preemptions"] == 1, "of the call, not of its last epoch"
        assert trainer.train()["preemptions"] == 0
    del told[3:]
    assert [row[:4] for row in told] == [(n, n, 96, epochs.PER_EPOCH) for n in (1, 2, 3)]
    assert len({row[4] for row in told}) == 3
    assert last["loss"] == told[-1][4]


def test_a_job_that_fails_while_an_epoch_is_told_is_explained_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad batch of the next epoch, say: the error had no traceback of the worker's."""

    def failed_meanwhile(running: Any, _: int) -> Any:
        (tmp_path / "broken").touch()
        until(running.check)  # raises

    monkeypatch.setattr(trainer_module, "epoch_metrics", failed_meanwhile)
    spec = graphft.dataset("tests.driver.failing:Failing", {"broken": str(tmp_path / "broken")}, chunk_size=16)
    with epochs.trainer(tmp_path / "job", chunks=spec) as trainer, pytest.raises(graphft.WorkerFailed) as caught:
        trainer.train(max_retries=-1, epochs=500)
    assert "ZeroDivisionError: as the test wants it" in caught.value.traceback
