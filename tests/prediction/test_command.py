"""`graphft predict`: files in, a file out, whole or not at all."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphft
from graphft.runtime.cli import main
from tests.prediction.jobs import X, by_batches, complete_job
from tests.support.commands import refused, shown

FIELDS = ("a", "b", "c", "d")


def write_csv(path: Path, x: torch.Tensor, names: tuple[str, ...] = FIELDS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*names, "note"))
        writer.writerows([*row.astype(str), "text"] for row in x.numpy())
    return path


def test_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data, out = complete_job(tmp_path / "job"), write_csv(tmp_path / "new.csv", X[:100]), tmp_path / "p.csv"
    out.write_text("older")
    said = shown(capsys, "predict", tmp_path / "job", "--data", data, "--column", "x=a,b,c,d", "--out", out)
    assert said.startswith(f"{out}: 100 records, output: float32[batch, 3]; ")
    found = np.loadtxt(out, delimiter=",", skiprows=1, dtype=np.float32)
    assert np.array_equal(found, by_batches(model, X[:100]).numpy())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job", "new.csv", "p.csv"], "nothing is left"


def test_fields_are_those_of_the_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with write_csv(tmp_path / "train.csv", X[:64]).open() as file:
        rows = [line.strip() + (",y" if not i else ",1") for i, line in enumerate(file)]
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    data = graphft.files(str(tmp_path / "train.csv"), "csv", {"x": FIELDS, "y": "y"}, {"y": "int64"}, chunk_size=32)
    model = complete_job(tmp_path / "job", data=data)
    new = write_csv(tmp_path / "new.csv", X[:9])
    shown(capsys, "predict", tmp_path / "job", "--data", new, "--out", tmp_path / "p.npz")
    assert np.array_equal(np.load(tmp_path / "p.npz")["output"], by_batches(model, X[:9]).numpy())


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete_job(tmp_path / "job")
    data = write_csv(tmp_path / "new.csv", X)
    lines = data.read_text().splitlines()
    lines[600] = "1,2,red,4,text"
    data.write_text("\n".join(lines) + "\n")
    out = tmp_path / "p.csv"
    arguments = ("predict", tmp_path / "job", "--data", data, "--column", "x=a,b,c,d", "--out", out)
    assert "line 601 of new.csv: field c is 'red', no float32" in refused_aloud(capsys, *arguments)
    assert not out.exists()
    lines[600] = "1,2,3,4,text"
    data.write_text("\n".join(lines) + "\n")
    shown(capsys, *arguments)
    assert len(out.read_text().splitlines()) == 1001


def test_a_value_that_the_model_cannot_take_is_told_with_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Embedding(120, 4), nn.Flatten())
    loss = lambda model, tok, y: F.cross_entropy(model(tok), y)  # noqa: E731
    program = graphft.build(model, loss, {"tok": ((None, 2), torch.int64), "y": ((None,), torch.int64)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(tok=torch.zeros(64, 2).long(), y=torch.zeros(64).long(), chunk_size=32)
    graphft.transpile(program, data=data, batch_size=20, name="t").save(tmp_path / "job")
    graphft.save_weights(program, None, tmp_path / "job" / "model.safetensors")
    tok = np.arange(1, 101).reshape(50, 2)
    tok[25, 1] = 500
    np.savez(tmp_path / "new.npz", tok=tok)
    (tmp_path / "new.csv").write_text("a,b\n" + "".join(f"{a},{b}\n" for a, b in tok))
    for file in ("new.npz", "new.csv"):
        column = ("--column", "tok=a,b") if file == "new.csv" else ()
        said = refused_aloud(
            capsys, "predict", tmp_path / "job", "--data", tmp_path / file, *column, "--out", tmp_path / "p.npz"
        )
        assert "error[op-failed]: in records 20 to 39: " in said
        assert "aten.embedding failed: " in said


def refused_aloud(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(a) for a in arguments]) == 2
    return capsys.readouterr().err


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete_job(tmp_path / "job")
    data, job = write_csv(tmp_path / "new.csv", X[:10]), tmp_path / "job"
    column = ("--column", "x=a,b,c,d")
    said = refused(capsys, "predict", job, "--data", data, *column, "--out", tmp_path / "p.txt")
    assert "p.txt is no name of a file" in said
    assert "--column x" in refused(capsys, "predict", job, "--data", data, "--column", "x", "--out", tmp_path / "p.csv")
    said = refused(capsys, "predict", job, "--data", data, "--data", "more.npz", *column, "--out", tmp_path / "p.csv")
    assert "error[format]" in said
    before = data.read_bytes()
    said = refused(capsys, "predict", job, "--data", tmp_path / "n*.csv", *column, "--out", data)
    assert "new.csv is the data to predict from" in said
    assert data.read_bytes() == before
    model = job / "model.safetensors"
    said = refused(capsys, "predict", job, "--data", data, *column, "--out", model)
    assert "is in the folder of the job" in said
    assert graphft.read_weights(model)
    assert not (tmp_path / "p.csv").exists()
