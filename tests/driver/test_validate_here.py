"""What `Trainer.validate()` computes in the script's own process, when that is told to end."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.runtime.driver.validation import validate_here
from graphft.runtime.executor import Executor
from graphft.runtime.launcher.ending import Interrupted, interruptible
from graphft.transpiler.evaluation import evaluation_of


class Figure:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_comes_within_a_finalizer_ends_it_before_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean()

    def interrupted() -> None:
        with interruptible(lambda: "interrupted"):
            Figure()
            validate_here(evaluation, validation.config(), model.state_dict(), "cpu")

    ran: list[Any] = []
    monkeypatch.setattr(Executor, "run", lambda *_: ran.append(1))
    model = nn.Linear(2, 1)
    program = graphft.build(model, loss_fn, inputs={"x": (None, 2)})
    validation = graphft.Validation(data=graphft.arrays(x=torch.zeros(8, 2), chunk_size=4))
    evaluation = evaluation_of(program, validation)
    with pytest.raises(Interrupted):
        interrupted()
    assert not ran
