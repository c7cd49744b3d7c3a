"""What a script does with a Trainer beside training: several of them, checkpoints that follow, what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import graphft
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.launcher.folder_status import look_at
from tests.driver import epochs
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_thread_trains(tmp_path: Path) -> None:
    """The one that does waits until the others have tried to."""
    found: list[object] = []

    class Waits:
        def on_status(self, status: Any) -> None:
            until(lambda: len(found) >= 2)

    def train() -> None:
        try:
            found.append(trainer.train()["epoch"])
        except graphft.GraphftError as error:
            found.append(error.rule)

    with epochs.trainer(tmp_path / "job", callbacks=[Waits()]) as trainer:
        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, found)) == ["1", "busy", "busy"]
        assert trainer.train()["epoch"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_a_state_is_not_loaded_into_a_run_that_another_script_trains(
    tmp_path: Path, own: bool, etcd_server: EmbeddedEtcd
) -> None:
    """The one waits for its end; with an etcd that is not the job's own, it is refused."""
    options = {} if own else {"etcd_endpoints": tuple(etcd_server.endpoints), "name": f"e{os.getpid()}"}
    folder = tmp_path / "job"
    other = subprocess.Popen([sys.executable, "-m", "tests.driver.epochs", str(folder), "400", json.dumps(options)])
    zeros = {name: torch.zeros_like(value) for name, value in epochs.model().state_dict().items()}
    try:
        with epochs.trainer(folder, **options) as trainer:

            def is_refused() -> bool:
                """The checkpoint that is to be replaced may be gone meanwhile, as the run goes on."""
                with pytest.raises(graphft.GraphftError) as caught:
                    trainer.load_state_dict(zeros)
                if caught.value.rule == "checkpoint":
                    return False
                assert "processes of it are registered" in str(caught.value)
                return True

            until(lambda: trainer.epoch >= 2)
            waiting = threading.Thread(target=epochs.trainer(folder, **options).load_state_dict, args=(zeros,))
            if own:
                waiting.start()
            else:
                until(is_refused)
            before = trainer.epoch
            until(lambda: trainer.epoch > before + 2)
            assert any(bool(value.any()) for value in trainer.state_dict()["model"].values())
            other.terminate()
            other.wait()
            if own:
                waiting.join()
                assert not any(bool(value.any()) for value in trainer.state_dict()["model"].values())
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
def test_a_failure_is_in_the_status_of_the_folder(tmp_path: Path) -> None:
    spec = graphft.dataset("tests.driver.failing:Failing", {"broken": str(tmp_path / "broken")}, chunk_size=16)
    trainer = epochs.trainer(tmp_path / "job", chunks=spec, max_failures=50)
    trainer.train()
    (tmp_path / "broken").touch()
    with pytest.raises(graphft.WorkerFailed):
        trainer.train(max_retries=0)
    status = look_at(tmp_path / "job")
    assert status.state == "failed"
    assert "max_retries is 0" in status.failure
    (tmp_path / "broken").unlink()
    assert trainer.train()["epoch"] == 2
    trainer.shutdown()
    assert look_at(tmp_path / "job").state == "stopped"


@pytest.mark.slow
def test_nothing_of_the_processes_is_left(tmp_path: Path) -> None:
    """What roles start by themselves ends, and is collected, also of those that were killed just now."""
    with epochs.trainer(tmp_path / "job") as trainer:
        begun, before = time.time(), psutil.Process().children()
        for _ in range(3):
            trainer.train()
            for role in ("trainer", "pserver"):
                assert trainer.signal(role, 0, signal.SIGKILL)
            trainer.shutdown()
    # What earlier tests have left may come to this process meanwhile.
    new = [child for child in psutil.Process().children() if child not in before and child.create_time() >= begun - 1]
    assert not new


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
