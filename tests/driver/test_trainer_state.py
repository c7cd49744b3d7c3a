"""Checkpoints of a Trainer's run, damaged, gone or pruned, and what others find in them: another Trainer, torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.driver import running_job
from graphft.runtime.driver.running_job import NewestCheckpoint
from graphft.runtime.launcher.folder_status import look_at
from tests.driver import epochs

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("forks")]


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
    (newest,) = (tmp_path / "job" / "checkpoints").glob(f"step-*{2 * epochs.PER_EPOCH}.g*")
    (newest / "manifest.json").unlink()
    with epochs.trainer(tmp_path / "job") as trainer:
        assert trainer.epoch == 1
        assert trainer.train()["epoch"] == 2
        found = trainer.state_dict()
    assert (found["epoch"], found["step"]) == (2, 2 * epochs.PER_EPOCH)
    assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())


@pytest.mark.slow
def test_another_trainer_of_the_run_takes_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = epochs.trainer(tmp_path / "job")
    first.train()
    with epochs.trainer(tmp_path / "job") as second:
        assert second.epoch == 1
        assert second.train()["epoch"] == 2
        assert "another Trainer of this process is at work" in capfd.readouterr().err
        assert not [worker for worker in first.workers() if worker.pid]
        assert len(second.workers()) == 4
    assert first.train()["epoch"] == 3, "it goes on where the other one was"
    first.shutdown()


def test_what_is_saved_goes_to_plain_torch(tmp_path: Path) -> None:
    with epochs.trainer(tmp_path / "job") as trainer:
        trainer.train()
        assert trainer.save(tmp_path / "saved", metrics={"loss": 0.5}) == 0
        state = trainer.state_dict()
    status = graphft.read_check_point(tmp_path / "saved").status
    assert (status.next(), status.step, status.metrics) == (1, epochs.PER_EPOCH, {"loss": 0.5})
    model = epochs.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    assert graphft.load_optimizer(optimizer, model, tmp_path / "saved") == epochs.PER_EPOCH
    graphft.load_into(model, graphft.read_weights(tmp_path / "saved"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state["model"][name])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state["optimizer"][name]["exp_avg"])


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
