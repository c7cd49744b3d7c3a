"""Checkpoints of a Trainer's run that are damaged, gone, or put in the place of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.launcher.folder_status import look_at
from tests.driver import epochs

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_checkpoints_that_are_gone_are_no_beginning(tmp_path: Path) -> None:
    trainer = epochs.trainer(tmp_path / "job", validation=epochs.validation())
    trainer.train(epochs=2)
    trainer.shutdown()
    (tmp_path / "job" / "checkpoints").rename(tmp_path / "away")
    another = epochs.trainer(tmp_path / "job", validation=epochs.validation())
    for one, what in (
        (trainer, f"step {2 * epochs.PER_EPOCH} is gone, or damaged: .* holds no"),
        (another, "was there when it was trained last is gone"),
    ):
        looks = (lambda: one.epoch, one.train, one.validate, one.state_dict, lambda: one.save(tmp_path / "saved"))  # noqa: B023
        for call in looks:
            with pytest.raises(graphft.GraphftError, match=what):
                call()
    assert not (tmp_path / "saved").exists()
    assert "its checkpoints are gone, or damaged: bring them back" in look_at(tmp_path / "job").describe()
    (tmp_path / "away").rename(tmp_path / "job" / "checkpoints")
    assert another.train()["epoch"] == 3
    another.shutdown()
    assert trainer.epoch == 3


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_is_trained_again(tmp_path: Path) -> None:
    with epochs.trainer(tmp_path / "job") as trainer:
        trainer.train(epochs=2)
        expected = trainer.state_dict()
        (tmp_path / "job" / "checkpoints").rename(tmp_path / "away")
        for look in (trainer.state_dict, lambda: trainer.save(tmp_path / "saved")):
            with pytest.raises(graphft.GraphftError, match=r"error\[(no-)?checkpoint\]"):
                look()
        (tmp_path / "away").rename(tmp_path / "job" / "checkpoints")
    (newest,) = (tmp_path / "job" / "checkpoints").glob(f"step-*{2 * epochs.PER_EPOCH}.g*")
    (newest / "manifest.json").unlink()
    with epochs.trainer(tmp_path / "job") as trainer:
        assert trainer.epoch == 1
        assert trainer.train()["epoch"] == 2
        found = trainer.state_dict()
    assert (found["epoch"], found["step"]) == (2, 2 * epochs.PER_EPOCH)
    assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
