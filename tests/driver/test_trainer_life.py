"""What a script does with a Trainer beside training: several of them, checkpoints that follow, what happened."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphft
from tests.driver import epochs
from tests.support.disks import small_file_system
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


def test_what_an_epoch_did_without_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each of the two steps that see the record that is not finite is left out."""
    data = epochs.data()
    data["x"][5, 0] = math.nan
    chunks = graphft.arrays(**data, chunk_size=16)
    with epochs.trainer(tmp_path / "job", chunks=chunks, on_nonfinite="skip") as trainer:
        for _ in range(2):
            metrics = trainer.train()
            assert (metrics["samples"], metrics["left_out"]) == (80, 16)
            assert math.isfinite(metrics["loss"])
    told = capfd.readouterr().err
    assert "epoch 1 LEFT OUT 16 records" in told
    assert "epoch 2 LEFT OUT 16 records" in told


def test_one_thread_trains(tmp_path: Path) -> None:
    found: list[object] = []

    def train() -> None:
        try:
            found.append(trainer.train()["epoch"])
        except graphft.GraphftError as error:
            found.append(error.rule)

    with epochs.trainer(tmp_path / "job") as trainer:
        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, found)) == ["1", "busy", "busy"]
        assert trainer.train()["epoch"] == 2


def test_a_damaged_checkpoint_is_no_state_of_the_epoch(tmp_path: Path) -> None:
    with epochs.trainer(tmp_path / "job", checkpoint_every=100) as trainer:
        trainer.train(epochs=2)
        newest = max((tmp_path / "job" / "checkpoints").glob("step-*"), key=lambda folder: folder.stat().st_mtime)
        for part in newest.glob("*.safetensors"):
            part.write_bytes(b"damaged" * 9)
        for look in (trainer.state_dict, lambda: trainer.validate(epochs.validation())):
            with pytest.raises(graphft.GraphftError, match=r"of step 12, epoch 2, is damaged: .* of step 6, epoch 1"):
                look()
        assert trainer.train()["epoch"] == 3
        assert trainer.state_dict()["epoch"] == 3


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", 250) as folder, epochs.trainer(folder / "job") as trainer:
        trainer.train()
        before = trainer.state_dict()
        trainer.shutdown()
        filler = folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        with pytest.raises(
            graphft.GraphftError, match=r"cannot be written to .*No space left(?s:.*)nothing was changed"
        ):
            trainer.load_state_dict({name: torch.zeros_like(value) for name, value in before["model"].items()})
        filler.unlink()
        found = trainer.state_dict()
        assert all(torch.equal(found["model"][name], value) for name, value in before["model"].items())
        assert trainer.train()["epoch"] == 2
