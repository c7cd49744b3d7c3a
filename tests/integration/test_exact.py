"""Sync training has the same bits whatever the number of shards and of live trainers, and equals one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graphft
from graphft.ir import Program
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, play

pytestmark = pytest.mark.timeout(600)


def test_shards_and_live_trainers_do_not_change_a_bit(
    program: Program, folder: Path, pace: Pace, undisturbed: Played
) -> None:
    job = training.job(program, pace=pace.file, pservers=3)
    played = play(job, folder, [Act(lambda s: len(s.trainers) == 2, lambda _: pace.set(0))], trainers=2)
    assert max(len(s.trainers) for s in played.statuses) == 2
    assert_same_bits(played.state, undisturbed.state)


def test_it_equals_training_in_one_process(undisturbed: Played) -> None:
    """Each slot's batch has its own batch-norm statistics and its own dropout; the rest is one process's arithmetic.

    Tolerance: gradients are summed in another order than autograd's accumulation, 80 steps of Adam long.
    """
    job = undisturbed.job
    assert job.config.total_steps == 80 == undisturbed.result.steps
    eager = training.trained_in_one_process(job, training.network())
    model = training.network()
    graphft.load_into(model, undisturbed.result.model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, eager[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_each_step_has_its_metrics_once(undisturbed: Played) -> None:
    losses = undisturbed.result.metrics["loss"]
    assert [step for step, _ in losses] == list(range(undisturbed.job.config.total_steps))
    assert sum(loss for _, loss in losses[-9:]) < sum(loss for _, loss in losses[:9])
