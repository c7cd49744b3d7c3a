"""A script does more with a Trainer than training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graphft
from tests.driver import epochs

pytestmark = pytest.mark.timeout(600)


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
        trainer.save(tmp_path / "saved")
        state = trainer.state_dict()
    model = epochs.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    assert graphft.load_optimizer(optimizer, model, tmp_path / "saved") == epochs.PER_EPOCH
    graphft.load_into(model, graphft.read_weights(tmp_path / "saved"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state["model"][name])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state["optimizer"][name]["exp_avg"])
