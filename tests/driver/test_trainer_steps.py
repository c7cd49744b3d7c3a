"""Callbacks: steps and epochs are told once over all scripts of a run, with its bits, whatever is killed; events."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.runtime.process.metric_table import read_rows
from tests.callbacks.test_loggers import rows
from tests.driver import epochs
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
EPOCHS, KILLS = 3, 2
EXACT = ("epoch", "loss", "accuracy", "samples", "discarded", "steps")

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("forks")]


class Told:
    def __init__(self, fails: bool = False) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.epochs: list[dict[str, float]] = []
        self.fails = fails

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append((step, metrics))

    def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        if self.fails:
            raise ValueError("as the test wants it")
        self.epochs.append({name: metrics[name] for name in EXACT})


@pytest.mark.slow
def test_an_epoch_whose_script_died_is_told_to_the_next_one_first(tmp_path: Path) -> None:
    first, second, third = Told(fails=True), Told(), Told()
    with pytest.raises(ValueError, match="as the test wants it"):
        epochs.trainer(tmp_path / "job", callbacks=[first]).train()
    with epochs.trainer(tmp_path / "job", callbacks=[second]) as trainer:
        metrics = trainer.train()
    assert [step for step, _ in first.steps] == list(range(epochs.PER_EPOCH))
    assert [step for step, _ in second.steps] == list(range(epochs.PER_EPOCH, 2 * epochs.PER_EPOCH))
    assert [found["epoch"] for found in second.epochs] == [1, 2]
    assert second.epochs[1] == {name: metrics[name] for name in EXACT}
    assert (second.epochs[0]["samples"], second.epochs[0]["steps"]) == (96, epochs.PER_EPOCH)
    assert first.steps + second.steps == list(read_rows(tmp_path / "job").steps())
    with epochs.trainer(tmp_path / "job", callbacks=[third]) as trainer:
        assert trainer.epoch == 2, "nothing is left to train"
    assert not trainer.workers()
    assert (third.steps, third.epochs) == ([], [])


@pytest.mark.slow
def test_a_script_that_is_killed_logs_each_step_once(tmp_path: Path) -> None:
    with epochs.trainer(tmp_path / "undisturbed", callbacks=[told := Told()]) as trainer:
        trainer.train(epochs=EPOCHS)
        model = trainer.state_dict()["model"]
    options = json.dumps({"loggers": {"CSVLogger": "steps.csv"}})
    command = [sys.executable, "-m", "tests.driver.epochs", f"{tmp_path}/job", str(EPOCHS), options]
    env, rng = os.environ | {"PYTHONPATH": str(ROOT)}, random.Random(1)
    for kill in range(KILLS + 1):
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL) as script:
            if kill == KILLS:
                assert script.wait(300) == 0
                break
            before = noted(tmp_path)
            until(lambda: noted(tmp_path) != before or script.poll() is not None, 240)  # noqa: B023
            time.sleep(0.3 * rng.random())
            script.kill()
    with epochs.trainer(tmp_path / "job") as trainer:
        found = trainer.state_dict()["model"]
        assert all(torch.equal(found[name], value) for name, value in model.items())
        assert not trainer.workers(), "nothing was started to look at it"
    logged = [
        (int(row["step"]), {n: float(row[n]) for n in ("loss", "accuracy")})
        for row in rows(tmp_path / "job" / "steps.csv")
    ]
    assert logged == told.steps
    found = [{name: float(row[name]) for name in EXACT} for row in rows(tmp_path / "job" / "steps-epochs.csv")]
    assert found == told.epochs


def noted(folder: Path) -> Any:
    path = folder / "job" / "callbacks.json"
    return path.read_bytes() if path.exists() else None


def test_an_async_job_tells_each_of_its_batches(tmp_path: Path) -> None:
    job = graphft.transpile(
        epochs.program(), trainers=2, epochs=2, sync=False, ft=True, data=epochs.chunks(), **epochs.OPTIONS
    )
    told = Told()
    result = job.run(job_dir=str(tmp_path / "job"), quiet=True, callbacks=[told])
    assert [step for step, _ in told.steps] == list(range(result.steps)), "in the order in which they were applied"
    assert [(row["epoch"], row["samples"]) for row in told.epochs] == [(1, 96), (2, 96)]


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
