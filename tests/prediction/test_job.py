"""A job from its script to its predictions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import graphft
from graphft.runtime.checkpoint.store import checkpoints_of
from tests.prediction.jobs import FEATURES, X, by_batches, make_model


@pytest.mark.usefixtures("forks")
def test_what_a_job_has_trained_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = {"x": (None, FEATURES), "y": ((None,), torch.int64)}
    program = graphft.build(make_model(), lambda model, x, y: F.cross_entropy(model(x), y), inputs)
    graphft.minimize(program, graphft.Adam(lr=0.05))
    data = graphft.arrays(x=X[:256], y=(X[:256].sum(1) > 0).long(), chunk_size=64)
    job = graphft.transpile(
        program, data=data, batch_size=32, trainers=2, ft=True, name="signs", checkpoint_every=2, epochs=2
    )
    result = job.run(quiet=True)
    model = graphft.load_into(make_model(), result.model).eval()
    found = result.predict({"x": X})["output"]
    assert torch.equal(found, by_batches(model, X))
    assert torch.equal(job.predict({"x": X})["output"], found)
    at = graphft.predict("signs", {"x": X[:64]}, step=result.steps)["output"]
    assert torch.equal(at, found[:64]), "the last checkpoint has the same weights"
    earlier = min(m.step for m in checkpoints_of(result.job_dir).manifests())
    weights = graphft.read_weights("jobs/signs", version=earlier)
    predicted = graphft.predict("signs", {"x": X[:64]}, step=earlier)["output"]
    assert torch.equal(predicted, by_batches(graphft.load_into(make_model(), weights).eval(), X[:64]))
    assert torch.equal(predicted, found[:64]) == (earlier == result.steps)
