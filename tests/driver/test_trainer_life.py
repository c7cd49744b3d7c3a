"""What a script does with a Trainer beside training: several of them, checkpoints that follow, what happened."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import graphft
from tests.driver import epochs
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


def test_another_trainer_of_the_run_takes_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A notebook's cell that makes the Trainer is run again."""
    first = epochs.trainer(tmp_path / "job")
    first.train()
    with epochs.trainer(tmp_path / "job") as second:
        assert second.epoch == 1
        assert second.train()["epoch"] == 2
        assert "another Trainer of this process is at work" in capfd.readouterr().err
        assert not [worker for worker in first.workers() if worker.state == "running"]
        assert len(second.workers()) == 4
    assert first.train()["epoch"] == 3, "it goes on where the other one was"
    first.shutdown()


def test_an_epoch_whose_checkpoint_follows_is_done(tmp_path: Path) -> None:
    with epochs.trainer(tmp_path / "job") as trainer:
        found = [trainer.train(checkpoint=None)["epoch"] for _ in range(3)]
        assert found == [1, 2, 3], "none is trained twice"
        assert trainer.epoch == 3
        assert trainer.state_dict()["epoch"] == 3
        assert trainer.train(checkpoint=None)["epoch"] == 4
    assert trainer.epoch == 4, "it was waited for"


def test_events_are_told_up_to_now_and_stay(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listener:
        def on_event(self, event: Any) -> None:
            heard.append(event.text)

    with epochs.trainer(tmp_path / "job", callbacks=[Listener()]) as trainer:
        trainer.train()
        assert trainer.signal("pserver", 1, signal.SIGKILL)
        until(lambda: any("pserver 1 died" in event.text for event in trainer.events()), 60)
        assert trainer.train()["preemptions"] == 1, "one of a pause"
    assert any("pserver 1 died" in event.text for event in trainer.events())
    assert sum("pserver 1 died" in text for text in heard) == 1


def test_a_callback_that_shuts_down_ends_the_call(tmp_path: Path) -> None:
    class Stops:
        def on_status(self, status: Any) -> None:
            trainer.shutdown()

    trainer = epochs.trainer(tmp_path / "job", callbacks=[Stops()])
    with pytest.raises(graphft.GraphftError, match="was shut down while it trained"):
        trainer.train()


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
        assert trainer.train()["epoch"] == done + 1
        time.sleep(2.0)  # for what goes on unasked
        assert trainer.epoch == trainer.state_dict()["epoch"] == done + 1


def test_a_metric_that_is_no_number_ends_no_job(tmp_path: Path) -> None:
    """As the recall of a class that no record has."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = epochs.loss_fn(model, x, y)
        found = (y == 7).float().sum()
        return loss, {**metrics, "recall": found / found}

    with epochs.trainer(tmp_path / "job", loss=loss_fn) as trainer:
        metrics = trainer.train()
    assert math.isnan(metrics["recall"])
    assert math.isfinite(metrics["accuracy"])
    assert math.isfinite(metrics["loss"])
