"""What runs under faults have brought to light, each as the smallest case that shows it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.chaos.fault_schedule import Fault
from graphft.runtime.chaos.run import ChaosOptions, Run
from graphft.runtime.roles.trainer.slot_trainer import SlotTrainer
from graphft.runtime.roles.trainer.state import TrainerState
from graphft.runtime.transport import ZmqClient
from tests.support.programs_by_hand import linear


def test_asking_a_trainer_to_leave_needs_no_lock_that_it_may_hold() -> None:
    """SIGTERM came while the main thread was sending: its handler waited for the lock that the thread held, and the
    trainer kept its slots, and the job, until its lease had ended."""
    trainer = SlotTrainer.__new__(SlotTrainer)
    trainer.transport, trainer.state = ZmqClient("t"), TrainerState()

    def asked() -> None:
        with trainer.transport._lock:
            trainer._leave()

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert trainer.state.leaving
    trainer.transport.close()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Of 100 steps."""
    data = graphft.arrays(chunk_size=10, x=torch.zeros(100, 8), y=torch.zeros(100, 1))
    job = graphft.transpile(linear(features=8), chunks=data, batch_size=1, ft=True, passes=1)
    assert job.config.total_steps == 100
    run = Run(job, tmp_path, ChaosOptions(), [], lambda line: None)
    run._fired_at = 1.0
    return run


@pytest.mark.parametrize(("version", "due"), [(97, True), (98, False), (100, False)])
def test_no_fault_comes_to_a_job_that_is_nearly_through(run: Run, version: int, due: bool) -> None:
    """A fault that had waited killed the launcher of a job that was complete: nothing could be launched again."""
    run.recoveries.low = version
    assert run._due(Fault("kill-job", step=5, after=2.0, target=0.0, seconds=1.0), now=3.0) is due


@pytest.mark.parametrize(("version", "due"), [(49, False), (51, False), (52, True)])
def test_an_overdue_fault_does_not_wait_for_what_is_still_stopped(run: Run, version: int, due: bool) -> None:
    """Fast jobs ended with half of their faults to come."""
    run.host.later(60.0, lambda: None)
    run.recoveries.low = version
    fault = Fault("kill-trainer", step=50, after=None, target=0.0, seconds=1.0)
    assert run._due(fault, now=30.0) is due
    run.recoveries.begin("kill-pserver", "", 29.0, True)
    assert not run._due(fault, now=30.0)
