"""A job's model as a `.pt2` file: plain torch loads it, without graphft, and it gives the bits of `graphft.predict`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.runtime.interchange.trained_program import export_program
from graphft.runtime.validation.best_model import BestModels, Kept
from graphft.transpiler.prediction import prediction_of
from tests.prediction.jobs import X, complete_job, make_model
from tests.support import zoo
from tests.support.commands import refused, shown

PLAIN = """
import sys, numpy, torch
torch.set_num_threads(1)
module = torch.export.load(sys.argv[1]).module()
x = torch.tensor(numpy.load(sys.argv[2])["x"])
numpy.savez(sys.argv[3], **{str(n): module(x[:n]).numpy() for n in (1, 2, 7, 32)})
assert "graphft" not in sys.modules
print(sorted(torch.export.load(sys.argv[1]).state_dict))
"""


@pytest.mark.slow
def test_plain_torch_gives_the_bits_of_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = complete_job(tmp_path / "job")
    said = shown(capsys, "checkpoint", "export", tmp_path / "job", tmp_path / "model.pt2")
    assert "takes (x: float32[batch, 4]), and returns output: float32[batch, 3]" in said
    np.savez(tmp_path / "x.npz", x=X.numpy())
    arguments = [tmp_path / "model.pt2", tmp_path / "x.npz", tmp_path / "found.npz"]
    command = [sys.executable, "-c", PLAIN, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(sorted(n for n in model.state_dict() if "num_batches" not in n))
    found = np.load(tmp_path / "found.npz")
    for size in (1, 2, 7):
        want = graphft.predict(tmp_path / "job", {"x": X[:size]})["output"]
        assert np.array_equal(found[str(size)], want.numpy())
    with torch.no_grad():
        assert np.array_equal(found["32"], model(X[:32]).numpy())


def test_open_dimensions_and_several_inputs() -> None:
    found = zoo.embedding()
    program = prediction_of(graphft.build(found.model, found.loss_fn, found.inputs).origin)
    module, names = export_program(program).module(), program.attrs["extras"]
    for size in (1, 3, 16):
        batch = found.batch(size)
        given = {n: batch[n] for n in program.variables if n in batch}
        want = graphft.Executor().run(program, given, names)
        assert torch.equal(module(*given.values()), want[names[0]])


def test_several_results_are_a_dict() -> None:
    found = zoo.mlp()

    def predict(model: nn.Module, x: Tensor) -> dict[str, Any]:
        return {"p": model(x).softmax(1), "best": model(x).argmax(1)}

    program = prediction_of(graphft.build(found.model, found.loss_fn, found.inputs).origin, predict)
    results = export_program(program).module()(found.batch(3)["x"])
    assert results.keys() == {"p", "best"}
    assert torch.equal(results["p"].argmax(1), results["best"])


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete_job(tmp_path / "job")
    (tmp_path / "there.pt2").write_text("notes")
    said = refused(capsys, "checkpoint", "export", tmp_path / "job", tmp_path / "there.pt2")
    assert "is there already" in said
    assert (tmp_path / "there.pt2").read_text() == "notes"
    model = tmp_path / "job" / "model.safetensors"
    assert "holds no job" in refused(capsys, "checkpoint", "export", model, tmp_path / "m.pt2")
    found = zoo.mlp()
    program = prediction_of(graphft.build(found.model, found.loss_fn, found.inputs).origin)
    program.attrs["assume"] = (("batch >= 100", "train.py:3"),)
    with pytest.raises(GraphftError, match="no size of the dimensions batch was found"):
        export_program(program)


def test_the_best_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = graphft.arrays(x=X[:64], y=torch.zeros(64).long(), chunk_size=32)
    job, best = tmp_path / "job", make_model(2).eval()
    complete_job(job, validate=graphft.Validation(data=held_out, best="loss"), ft=True)
    said = refused(capsys, "checkpoint", "export", job, tmp_path / "none.safetensors", "--best")
    assert "has no best model" in said
    BestModels(job, "min").write(Kept(2, 0.5), best.state_dict())
    for name in ("model.pt2", "model.safetensors", "folder"):
        shown(capsys, "checkpoint", "export", job, tmp_path / name, "--best")
    with torch.no_grad():
        assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(X[:32]), best(X[:32]))
    for weights in map(graphft.read_weights, (tmp_path / "model.safetensors", tmp_path / "folder")):
        assert all(torch.equal(tensor, best.state_dict()[name]) for name, tensor in weights.items())
    said = refused(capsys, "checkpoint", "export", job, tmp_path / "d", "--best", "--version", "2")
    assert "the best model is asked for, and step 2, too" in said
    assert not (tmp_path / "d").exists()
