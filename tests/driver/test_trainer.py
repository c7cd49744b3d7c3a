"""`graphft.Trainer` on real processes: the bits of an undisturbed job, whatever is killed, and whenever."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import graphft
from graphft.runtime.coordination.result_files import read_validations
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.process.metric_table import read_rows
from tests.driver import epochs
from tests.support.eager import same
from tests.support.files import put
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("forks")]
EPOCHS = 4


class Undisturbed(NamedTuple):
    model: dict[str, Tensor]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A job of as many passes, run at once."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = graphft.transpile(
        epochs.program(), trainers=2, epochs=EPOCHS, ft=True, data=epochs.chunks(), **epochs.OPTIONS
    )
    model = epochs.model()
    graphft.load_into(model, job.run(job_dir=str(folder / "job"), quiet=True).model)
    found = []
    for epoch in range(EPOCHS):
        rows = read_rows(folder / "job", epoch * epochs.PER_EPOCH, epochs.PER_EPOCH)
        columns = rows.data["samples"], rows.values("loss"), rows.values("accuracy")
        total = loss = accuracy = 0.0
        for samples, of_loss, of_accuracy in zip(*(column.tolist() for column in columns), strict=True):
            total += samples
            loss += of_loss * samples
            accuracy += of_accuracy * samples
        found.append({"loss": loss / total, "accuracy": accuracy / total, "samples": int(total)})
    return Undisturbed(model.state_dict(), found)


def test_epochs_are_those_of_a_job_whatever_is_killed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    told = Told()
    with epochs.trainer(tmp_path / "job", callbacks=[told], validation=epochs.validation()) as trainer:
        state = trainer.state_dict()
        assert (state["epoch"], state["step"], state["optimizer"], trainer.epoch) == (0, 0, {}, 0)
        assert same(state["model"], epochs.model().state_dict())
        first: dict[str, Any] = trainer.train()
        assert (first["epoch"], first["samples"], first["steps"]) == (1, 96, epochs.PER_EPOCH)
        until(lambda: all(w.pid for w in trainer.workers()))  # the other trainer can do it all
        before = {(w.role, w.index): w.pid for w in trainer.workers()}
        assert sorted(before) == [("pserver", 0), ("pserver", 1), ("trainer", 0), ("trainer", 1)]
        assert trainer.signal("pserver", 1, signal.SIGKILL)  # while all wait
        assert trainer.signal("trainer", 0, signal.SIGKILL)
        second = trainer.train()
        assert (second["failures"], second["preemptions"]) == (0, 2)
        after = {(w.role, w.index): w.pid for w in trainer.workers()}
        assert {name for name in before if before[name] == after[name]} == {("pserver", 0), ("trainer", 1)}
        third = trainer.train(epochs=2, checkpoint=None)
        until(lambda: trainer.epoch == EPOCHS)
        assert same(trainer.state_dict()["model"], undisturbed.model)
        assert told.epochs == [1, 2, 3, 4]
        assert [m["epoch"] for m in (first, second, third)] == [1, 2, 4]
        for metrics in (first, second, third):
            assert metrics.items() >= undisturbed.metrics[metrics["epoch"] - 1].items(), "the same bits"
        assert any("killed by SIGKILL" in text for text in told.events)
        assert len(told.events) == len(set(told.events))
        found = trainer.validate()
    assert told.ended == 1
    model = epochs.model().eval()
    model.load_state_dict(undisturbed.model)
    with torch.no_grad():
        loss, more = epochs.loss_fn(model, **epochs.data(50))
    assert found["samples"] == 50
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(more["accuracy"]))
    assert told.validated == [found]
    (row,) = read_validations(tmp_path / "job").values()
    assert row.epoch == EPOCHS
    noted = row.metrics
    assert noted == {name: found[name] for name in ("loss", "accuracy")}, "graphft runs tells it"


class Told:
    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.events: list[str] = []
        self.validated: list[dict[str, float]] = []
        self.ended = 0

    def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        assert metrics["epoch"] == epoch
        self.epochs.append(epoch)

    def on_event(self, event: Any) -> None:
        self.events.append(f"{event.at} {event.text}")

    def on_validation(self, epoch: int, metrics: dict[str, float]) -> None:
        assert epoch == EPOCHS
        self.validated.append(metrics)

    def on_end(self) -> None:
        self.ended += 1


@pytest.mark.slow
def test_a_failing_worker_exhausts_the_retries_and_its_traceback_is_told(tmp_path: Path) -> None:
    spec = graphft.dataset("tests.driver.epochs:Failing", {"broken": str(tmp_path / "broken")}, chunk_size=16)
    with epochs.trainer(tmp_path / "job", data=spec, max_failures=50) as trainer:
        trainer.train()
        (tmp_path / "broken").touch()
        with pytest.raises(graphft.WorkerFailed, match="max_retries is 2") as caught:
            trainer.train(max_retries=2)
        assert "ZeroDivisionError: as the test wants it" in caught.value.traceback
        assert "in __getitem__" in caught.value.traceback
        assert str(caught.value).startswith("error[retries]: trainer ")
        assert not trainer.workers()
        status = look_at(tmp_path / "job")
        assert (status.state, "max_retries is 2" in status.failure) == ("failed", True)
        (tmp_path / "broken").unlink()
        assert trainer.train()["epoch"] == 2
        put(tmp_path / "broken", "exit")
        with pytest.raises(graphft.WorkerFailed, match="exit status 3") as caught:
            trainer.train(max_retries=0)
        assert caught.value.traceback == "", "that of another failure, long ago, is none of this one"
