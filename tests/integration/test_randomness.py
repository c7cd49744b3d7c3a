"""A Dataset that draws random numbers now and then: undisturbed runs end with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphft
from graphft import ir
from graphft.transpiler import Job
from tests.integration import training
from tests.integration.plays import Pace, assert_same_bits, play

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_two_runs_of_a_dataset_that_draws_for_some_records(program: ir.Program, folder: Path, pace: Pace) -> None:
    """The second run has fewer trainers; the step has random numbers of its own (dropout)."""
    data = graphft.dataset(f"{training.__file__}:NoisyBlobs", chunk_size=training.CHUNK)
    assert data.source["random"] is False, "no record that draws is looked at when it is described"
    usual = training.job(program, epochs=2)
    job = Job.make(usual.source, usual.config.replace(data=data))
    runs = [play(job, folder / str(trainers), trainers=trainers) for trainers in (3, 1)]
    assert_same_bits(runs[0].state, runs[1].state)
