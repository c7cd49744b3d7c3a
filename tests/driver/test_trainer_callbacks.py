"""A Trainer's callbacks hear events and epochs, and may end a call."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import graphft
from tests.driver import epochs
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("forks")]


@pytest.mark.slow
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


@pytest.mark.slow
def test_epochs_of_one_call_are_told_one_by_one(tmp_path: Path) -> None:
    told: list[Any] = []

    class Listener:
        def on_epoch(self, epoch: int, metrics: Any) -> None:
            told.append((epoch, metrics["epoch"], metrics["samples"], metrics["steps"], metrics["loss"]))
            state = trainer.state_dict()
            assert (state["epoch"], state["step"], trainer.epoch) == (epoch, epoch * epochs.PER_EPOCH, epoch)

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
