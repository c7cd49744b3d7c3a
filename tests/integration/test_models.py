"""Models of others, whole: captured, transpiled, trained by real processes of which some die, and exact."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import graphft
from graphft.runtime.data import open_reader
from tests.integration import training
from tests.integration.plays import Act, Pace, assert_same_bits, at, kill, play
from tests.support.inprocess import InProcess
from tests.support.zoo import CASES, HUGGING_FACE, Case

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
pytestmark = pytest.mark.timeout(600)
SAMPLES, BATCH, PASSES = 64, 8, 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", pytest.param("gpt2", marks=needs_transformers)])
def test_a_model_trains_exactly_while_processes_die(name: str, folder: Path, pace: Pace) -> None:
    torch.manual_seed(0)
    case: Case = (CASES | HUGGING_FACE)[name]()
    program = graphft.build(case.model, case.loss_fn, case.inputs, name=name)
    graphft.minimize(program, graphft.AdamW(lr=1e-3))
    job = graphft.transpile(
        program,
        data=training.paced(pace.file, 16, **case.batch(SAMPLES)),
        batch_size=BATCH,
        trainers=2,
        pservers=2,
        epochs=PASSES,
        ft=True,
        checkpoint_every=10,
    )
    acts = [Act(at(5), kill("trainer", 0)), Act(at(20), kill("pserver", 1)), Act(at(20), lambda _: pace.set(0))]
    played = play(job, folder, acts)
    reader = open_reader(job.config.data, folder, job.config.seed)
    alone = InProcess(job, lambda w: reader.batch(w.pass_index, w.chunk, w.batch, BATCH))
    alone.run()
    assert_same_bits(load_file(played.result.model), alone.model())
    first, last = (
        [loss for step, loss in played.result.metrics["loss"] if step in steps]
        for steps in (range(2), range(job.config.total_steps - 2, job.config.total_steps))
    )
    assert sum(last) < sum(first)
    graphft.load_into(case.model, played.result.model)
