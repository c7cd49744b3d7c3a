"""`graphft.predict`: each record once, in order, with the bits of the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphft
from graphft.errors import GraphftError
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.result_files import note_validation
from graphft.runtime.validation.best_model import BestModels, Kept
from tests.prediction.jobs import FEATURES, RECORDS, X, by_batches, complete_job, make_model


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Sequential]:
    folder = tmp_path_factory.mktemp("predict") / "job"
    return folder, complete_job(folder)


@pytest.mark.parametrize("chunk_size", [7, 96])
def test_the_bits_are_those_of_the_model_whatever_the_chunks_are(
    job: tuple[Path, nn.Sequential], chunk_size: int
) -> None:
    data = graphft.arrays(x=X, y=torch.zeros(RECORDS), chunk_size=chunk_size)  # what is not needed is not looked at
    assert torch.equal(graphft.predict(job[0], data)["output"], by_batches(job[1], X))
    assert torch.equal(graphft.predict(job[0], data, batch_size=300)["output"], by_batches(job[1], X, 300))


def test_the_process_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, threads = complete_job(tmp_path / "job", threads=2), torch.get_num_threads()
    run, seen = graphft.Executor.run, list[tuple[int, bool]]()

    def noted(*arguments: Any) -> Any:
        seen.append((torch.get_num_threads(), torch.is_autocast_enabled("cpu")))
        return run(*arguments)

    monkeypatch.setattr(graphft.Executor, "run", noted)
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        found = graphft.predict(tmp_path / "job", {"x": X[:40]})["output"]
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(found, by_batches(model, X[:40]))
    assert found.dtype == torch.float32
    assert set(seen) == {(2, False)}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(GraphftError):
        graphft.predict(tmp_path / "job", {"x": X[:, :2]})
    assert torch.get_num_threads() == threads


def test_what_is_not_finite_is_told(job: tuple[Path, nn.Sequential], caplog: pytest.LogCaptureFixture) -> None:
    x = X[:50].clone()
    x[7, 2] = float("nan")
    with caplog.at_level(logging.WARNING, "graphft"):
        found = graphft.predict(job[0], {"x": x})["output"]
    assert found[7].isnan().all()
    assert found[8].isfinite().all()
    assert "'output' is NOT FINITE for 1 of 50 records: record 7" in caplog.text


def test_a_batch_of_fixed_size_is_filled_up(tmp_path: Path) -> None:
    model = complete_job(tmp_path / "job", dim=8, batch_size=8)
    found = graphft.predict(tmp_path / "job", {"x": X[:21]})["output"]
    filled = torch.cat([X[:21], X[20:21].expand(3, FEATURES)])
    assert torch.equal(found, by_batches(model, filled, 8)[:21])
    with pytest.raises(GraphftError, match="captured for batches of 8 only, and batch_size is 5"):
        graphft.predict(tmp_path / "job", {"x": X[:21]}, batch_size=5)


@pytest.mark.parametrize(
    ("data", "options", "rule"),
    [
        ({"z": X}, {}, "columns"),
        ({"x": X.double()}, {}, "columns"),
        ({"x": X[:, :3]}, {}, "columns"),
        ({"x": X}, {"weight": 2}, "option"),
        *(({"x": X}, {"batch_size": "8"}, "batch-size"), ({"x": X}, {"device": "cuda:99"}, "device")),
        ({"x": X}, {"columns": {"x": "a"}}, "columns"),
        (X, {}, "data"),
        ("new.xls", {}, "format"),
        ("new.csv", {}, "columns"),
        ("gone.npz", {}, "format"),
        ("new.csv", {"columns": {"y": "b"}}, "columns"),
    ],
)
def test_what_does_not_fit(job: tuple[Path, nn.Sequential], data: Any, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(GraphftError, match=rf"(?s)^error\[{rule}\].*help: "):
        graphft.predict(job[0], data, **options)


def test_a_file_of_arrays_that_is_damaged(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=X.numpy(), note=np.array(["text", None]))
    data = (tmp_path / "x.npz").read_bytes()
    found = graphft.predict(job[0], tmp_path / "x.npz")
    assert torch.equal(found["output"], by_batches(job[1], X)), "other arrays are not read"
    flipped = bytes([*data[:200], data[200] ^ 64, *data[201:]])
    for name, content in (("cut", data[:-30]), ("flipped", flipped), ("empty", b"")):
        (tmp_path / f"{name}.npz").write_bytes(content)
        with pytest.raises(GraphftError, match=rf"{name}\.npz cannot be read"):
            graphft.predict(job[0], tmp_path / f"{name}.npz")


def test_the_best_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held_out = graphft.arrays(x=X[:64], y=torch.zeros(64).long(), chunk_size=32)
    folder, best = tmp_path / "job", make_model(2)
    complete_job(folder, validate=graphft.Validation(data=held_out, best="loss"), ft=True)
    with pytest.raises(GraphftError, match="has no best model"):
        graphft.predict(folder, {"x": X}, best=True)
    models = BestModels(folder, "min")
    models.write(Kept(2, 0.5), best.state_dict())
    models.write(Kept(4, 0.7), make_model(3).state_dict())
    note_validation(folder, 1, 2, {"loss": 0.5})
    note_validation(folder, 1, 4, {"loss": 0.7})
    found = graphft.predict(folder, {"x": X[:64]}, best=True)["output"]
    assert torch.equal(found, by_batches(best.eval(), X[:64]))
    line = "the model of step 2, the best one by loss, is MISSING from "
    assert line not in caplog.text
    (folder / "best" / "step-00000002.safetensors").unlink()
    with pytest.raises(GraphftError, match=line):
        graphft.predict(folder, {"x": X}, best=True)


def test_other_weights(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    other = make_model(3).eval()
    graphft.save_check_point({"model": other}, graphft.TrainStatus(0), tmp_path / "best")
    found = graphft.predict(job[0], {"x": X}, weights=tmp_path / "best")["output"]
    assert torch.equal(found, by_batches(other, X))
    with pytest.raises(GraphftError, match="weights are given, and step or best, too"):
        graphft.predict(job[0], {"x": X}, weights=tmp_path / "best", best=True)


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
