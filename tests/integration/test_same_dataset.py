"""A Dataset is the same one in every process that makes it, wherever that is started; or it is refused."""

from __future__ import annotations

import importlib
import os
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
from graphft.runtime.launcher.result import Result
from graphft.transpiler.job import Job
from tests.integration.plays import ROOT, Program

RECORDS = 64
ROWS = """
import os, sys
import torch

SCALE, ADDED = 1.0, 0.125 * len(sys.argv)
FACTOR = float(os.environ.get("FACTOR", "1"))

class Rows:
    def __init__(self, path="rows.txt"):
        self.rows = [float(line) for line in open(path)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x = torch.tensor([self.rows[i] * SCALE * FACTOR + ADDED])
        return x, 5 * x
"""
SCRIPT = """
import argparse, inspect, os, queue, sys
import graphft, ops, rows, torch

parser = argparse.ArgumentParser()
parser.add_argument("--added", type=float, required=True)
options = parser.parse_args()
library = os.path.dirname(inspect.getfile(os))
assert (ops.WHOSE, inspect.getfile(queue)) == ("the user's", os.path.join(library, "queue.py"))

class Added(rows.Rows):
    def __getitem__(self, i):
        x = super().__getitem__(i)[0] + options.added
        return x, 5 * x

if __name__ == "__main__":
    sys.path.append(sys.path.pop(1))  # PYTHONPATH, for this only
    from tests.integration import test_same_dataset as same

    data, held_out = graphft.dataset(Added, chunk_size=16), graphft.dataset("rows:Rows", chunk_size=16)
    result = same.job(data, held_out).run(quiet=True)
    same.check_validated(result, rows.Rows())
    same.check_predicted(result.predict(data)["output"], result, Added())
"""


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def job(data: graphft.DataSpec, held_out: graphft.DataSpec) -> Job:
    torch.manual_seed(0)
    program = graphft.build(nn.Linear(1, 1), loss_fn, inputs={"x": (None, 1), "y": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    options: dict[str, Any] = {"trainers": 1, "pservers": 1, "ft": True, "name": "rows"}
    return graphft.transpile(
        program, data=data, batch_size=16, epochs=2, validate=graphft.Validation(data=held_out), **options
    )


def trained(result: Result) -> nn.Linear:
    model = nn.Linear(1, 1)
    graphft.load_into(model, result.model)
    return model.requires_grad_(False)


def check_validated(result: Result, held_out: Any) -> None:
    x, y = (torch.stack(column) for column in zip(*(held_out[i] for i in range(RECORDS)), strict=True))
    wanted = loss_fn(trained(result), x, y)
    assert result.validations[result.steps]["loss"] == pytest.approx(float(wanted), rel=1e-5)


def check_predicted(output: Tensor, result: Result, given: Any) -> None:
    x = torch.stack([given[i][0] for i in range(RECORDS)])
    torch.testing.assert_close(output, trained(result)(x))


def write_rows(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "rows.txt").write_text("\n".join(str((i + 1) / 64) for i in range(RECORDS)))


@pytest.mark.slow
def test_a_job_knows_its_script_and_not_the_folder_that_it_is_started_in(tmp_path: Path) -> None:
    """Arguments are parsed at the top level, a variable of the environment is read, a path is relative; modules of the
    folder are named like the script's and like Python's."""
    source, start = tmp_path / "src", tmp_path / "start"
    source.mkdir()
    for name, text in {"train": SCRIPT, "rows": ROWS, "ops": 'WHOSE = "the user\'s"'}.items():
        (source / f"{name}.py").write_text(text)
    write_rows(start)
    for name in ("rows", "queue", "random", "ops"):
        (start / f"{name}.py").write_text("raise ImportError('it is not of the script')")

    def run(*command: str | Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "FACTOR": "0.5"}
        done = subprocess.run(command, cwd=start, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr

    run(sys.executable, Path("..", "src", "train.py"), "--added=0.25")
    x = np.ones((2, 1), np.float32)
    np.savez(start / "x.npz", x=x)
    run(Path(sys.executable).with_name("graphft"), "predict", "rows", "--data=x.npz", "--out=out.npz")
    result = Result.of(start / "jobs" / "rows" / "runs" / "1", 0, 0.0)
    np.testing.assert_allclose(np.load(start / "out.npz")["output"], trained(result)(torch.from_numpy(x)))


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as a script in the folder `of_script` has it."""
    write_rows(tmp_path / "of_script")
    (tmp_path / "of_script" / "own_rows.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path / "of_script")
    monkeypatch.syspath_prepend(tmp_path / "of_script")
    monkeypatch.setattr(sys, "argv", ["train.py", "--of", "script"])
    module = importlib.import_module("own_rows")
    yield module
    del sys.modules["own_rows"]


@pytest.mark.parametrize(
    ("of", "scale", "texts"),
    [
        ("data", 64.0, ("trainer 0 cannot start", "has 0.390625 in this process, and had 1.375 when")),
        ("held_out", 64.0, ("trainer 0 cannot start", "has 0.390625 in this process, and had 1.375 when")),
        ("data", 1.0, ("has 1.375 in this process, and had 0.390625 when",)),
    ],
    ids=["trainer", "validator", "script"],
)
def test_what_only_the_script_knows_of_is_refused(
    rows: Any, folder: Path, of: str, scale: float, texts: tuple[str, ...]
) -> None:
    """It sets a variable of the module, before the data is described, or before it makes the Dataset again itself."""
    stored = graphft.arrays(x=torch.zeros(RECORDS, 1), y=torch.zeros(RECORDS, 1), chunk_size=16)
    rows.SCALE = scale
    data = {"data": stored, "held_out": stored} | {of: graphft.dataset(rows.Rows, chunk_size=16)}
    rows.SCALE = 64.0
    with pytest.raises(GraphftError) as caught:
        job(**data).run(job_dir=str(folder), quiet=True)
    for text in ("error[data-changed]: column x of record 0 of the dataset of own_rows:Rows", *texts):
        assert text in str(caught.value)


def test_a_saved_job_reads_the_files_of_its_script(rows: Any, folder: Path, tmp_path: Path) -> None:
    """It is launched, and looked at, in a folder whose file of that name differs in records that are not compared; the
    script's arguments are not those of the command."""
    job(*(graphft.dataset(rows.Rows, chunk_size=16) for _ in range(2))).save(folder)
    held_out, elsewhere = rows.Rows(), tmp_path / "elsewhere"
    write_rows(elsewhere)
    lines = (elsewhere / "rows.txt").read_text().splitlines()
    (elsewhere / "rows.txt").write_text("\n".join([lines[0], "1000", *lines[2:]]))
    for command in (("launch",), ("replay", "--step=1", "--slot=0")):
        program = Program(elsewhere, "-m", "graphft", *command, "--job", os.path.relpath(folder, elsewhere))
        assert program.wait() == 0, program.output
    check_validated(Result.of(folder, 8, 0.0), held_out)
