"""A Dataset that belongs to a thread (sqlite3, threading.local): whatever reads it has made it on the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import graphft
from graphft.runtime.data import open_reader
from graphft.runtime.driver.validation import validate_here
from graphft.transpiler.evaluation import evaluation_of
from tests.data import bound_to_thread
from tests.integration.plays import Played, Program, play

pytestmark = pytest.mark.timeout(600)


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def data(name: str = "Rows") -> graphft.DataSpec:
    return graphft.dataset(f"{bound_to_thread.__file__}:{name}", {"records": 96}, chunk_size=24)


def make(name: str, sync: bool) -> graphft.Job:
    torch.manual_seed(0)
    program = graphft.build(nn.Linear(2, 1), loss_fn, {"x": (None, 2), "y": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.01))
    options = {"epochs": 2, "trainers": 2, "batch_size": 4, "name": "bound", "ft": True}
    validate = graphft.Validation(data=data(), batch_size=8, every=8) if sync else None
    return graphft.transpile(program, data=data(name), sync=sync, validate=validate, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sync"), [("Rows", True)])
def test_a_job_reads_it_without_a_failure(folder: Path, name: str, sync: bool) -> None:
    played = play(make(name, sync), folder)
    assert not played.result.discarded
    assert not {"restarted", "failed-batch", "hung", "validation-failed"} & set(played.events)
    assert bool(played.result.validations) == sync
    if name == "Rows" and sync:
        it_is_read_everywhere_else(played, folder)


def it_is_read_everywhere_else(played: Played, folder: Path) -> None:
    validation = graphft.Validation(data=data(), batch_size=8)
    evaluation = evaluation_of(played.job.source, validation)
    here = validate_here(evaluation, validation.config(), graphft.read_weights(folder), "cpu")
    assert here["samples"] == 96
    model = graphft.load_into(nn.Linear(2, 1), folder / "model.safetensors")
    rows = bound_to_thread.Rows()
    with torch.no_grad():
        want = model(torch.stack([rows[i][0] for i in range(96)]))
    assert torch.allclose(graphft.predict(folder, data())["output"], want)
    replay = Program(folder.parent, "-m", "graphft", "replay", "--job", str(folder), "--step", "3")
    assert replay.wait() == 0, replay.output
    assert len(open_reader(played.job.config.data, folder, 0).batch(0, 0, 0, 4)["x"]) == 4
