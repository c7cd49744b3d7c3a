"""A job's folder gives others its model and its optimizer, whole, however many pservers held them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphft
from graphft.disk.sealed_json import seal
from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.cli import main
from graphft.runtime.interchange.training_state import load_optimizer, read_job
from graphft.runtime.process.metric_table import read_rows
from tests.support.commands import refused, shown
from tests.support.eager import same

pytestmark = pytest.mark.usefixtures("forks")
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


def make_model(seed: int = 0, hidden: int = 32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 2))


def make_job(
    pservers: int, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **options: object
) -> graphft.Job:
    model = model or make_model()
    program = graphft.build(
        model, lambda m, x, y: nn.functional.cross_entropy(m(x), y), {"x": (None, 8), "y": ((None,), torch.int64)}
    )
    if optimizer is None:
        graphft.minimize(program, graphft.Adam(lr=0.02))
    else:
        graphft.minimize(program, optimizer, model=model)
    data = graphft.arrays(x=X, y=Y, chunk_size=16)
    return graphft.transpile(
        program, data=data, trainers=2, pservers=pservers, ft=True, slice_unit=64, min_block=64,
        **{"batch_size": 8, "epochs": 2, "name": f"j{pservers}", **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of pservers, the same job."""
    root, before = tmp_path_factory.mktemp("jobs"), Path.cwd()
    os.chdir(root)
    try:
        return {n: Path(make_job(n, checkpoint_seconds=0).run(quiet=True).model).parent.absolute() for n in (1, 3)}
    finally:
        os.chdir(before)


@pytest.fixture
def job(folders: dict[int, Path], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(folders[3], tmp_path / "job"))


@pytest.mark.slow
def test_slices_are_put_together(folders: dict[int, Path]) -> None:
    one, three = (read_job(folders[n]) for n in (1, 3))
    assert one.step == three.step == 8
    model = graphft.read_weights(folders[3] / "model.safetensors")
    assert same(three.model, model)
    assert three.optimizer.keys() == dict(make_model().named_parameters()).keys()
    for name, state in three.optimizer.items():
        assert state.keys() == {"exp_avg", "exp_avg_sq", "step"}
        assert state["exp_avg"].shape == model[name].shape
        assert bool(state["exp_avg_sq"].any())
        assert all(torch.equal(state[key], one.optimizer[name][key]) for key in state)


def test_another_kind_of_optimizer_is_refused(folders: dict[int, Path]) -> None:
    """Its momentum began from nothing, or its next step failed."""
    model = make_model()
    for optimizer, says in (
        (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), r"keeps \['exp_avg', .*, a SGD as this one"),
        (torch.optim.Adam(model.parameters(), amsgrad=True), "a Adam as this one .*'max_exp_avg_sq'"),
    ):
        with pytest.raises(GraphftError, match=says):
            load_optimizer(optimizer, model, folders[1])
        assert not optimizer.state
    double = make_model().double()
    with pytest.raises(GraphftError, match=r"is torch\.float32, the parameter torch\.float64"):
        load_optimizer(torch.optim.Adam(double.parameters()), double, folders[1])


def test_the_command_knows_a_jobs_checkpoints(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *lines = shown(capsys, "checkpoint", "list", job).splitlines()
    assert head.split()[:3] == ["version", "saved", "size"]
    assert lines[0].split()[0] == "8"
    assert "3 shards" in lines[0]
    rows = dict(read_rows(job).steps())
    assert f"loss {rows[7]['loss']:.6g}" in lines[0], "of the step that the checkpoint is of, not of an earlier one"
    text = shown(capsys, "checkpoint", "show", job, "--version", "8")
    assert "float32" in text
    assert "@exp_avg" in text
    assert ": good (" in shown(capsys, "checkpoint", "verify", job)
    (part,) = (job / "checkpoints").glob("step-00000008.*/shard-1-of-3.*")
    data = bytearray(part.read_bytes())
    data[-3] ^= 4
    part.write_bytes(data)
    assert main(["checkpoint", "verify", str(job)]) == 1
    assert f"{part} is no whole safetensors file: %" in capsys.readouterr().out
    part.unlink()
    assert "DAMAGED: " in shown(capsys, "checkpoint", "list", job)
    assert "has no checkpoint 7; it has [8]" in refused(capsys, "checkpoint", "show", job, "--version", "7")


def test_a_damaged_model_of_a_complete_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{job}/model.safetensors: good" in shown(capsys, "checkpoint", "verify", job)
    data = (job / "model.safetensors").read_bytes()
    (job / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert main(["checkpoint", "verify", str(job)]) == 1
    assert "is not what was written" in capsys.readouterr().out
    with pytest.raises(GraphftError, match=f"graphft checkpoint list {job}"):
        graphft.read_weights(job)


def older_copy(newest: Path) -> Path:
    """The same checkpoint, of step 4."""
    older = newest.with_name("step-00000004.g0")
    shutil.copytree(newest, older)
    manifest = (older / "manifest.json").read_text().replace('"step":8', '"step":4').replace(newest.name, older.name)
    (older / "manifest.json").write_bytes(seal(json.loads(manifest)["content"]))
    return older


def test_a_step_of_a_job_and_the_newest_that_is_whole(
    job: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = graphft.read_weights(job / "model.safetensors")
    for name, options in (("step.safetensors", ("--version", "8")), ("hf", ()), ("dcp", ("--format", "dcp"))):
        shown(capsys, "checkpoint", "export", job, tmp_path / name, *options)
        assert all(torch.equal(t, model[n]) for n, t in graphft.read_weights(tmp_path / name).items())
    assert "has no checkpoint of step 7" in refused(
        capsys, "checkpoint", "export", job, tmp_path / "other", "--version", "7"
    )
    (job / "model.safetensors").unlink()
    (newest,) = (job / "checkpoints").iterdir()
    older_copy(newest)
    (part,) = newest.glob("shard-0-*")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert read_job(job).step == 4


def test_a_checkpoint_that_the_job_deletes_while_it_is_shown(
    job: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header_of = CheckpointStore.header_of
    (newest,) = (job / "checkpoints").iterdir()
    older, aside = older_copy(newest), newest.rename(tmp_path / "aside")

    def deletes(*arguments: Any) -> Any:
        if older.exists():
            shutil.rmtree(older)
            aside.rename(newest)
        return header_of(*arguments)

    monkeypatch.setattr(CheckpointStore, "header_of", deletes)
    assert shown(capsys, "checkpoint", "show", job).split()[0] == "8"


def test_a_job_without_a_checkpoint(tmp_path: Path) -> None:
    make_job(2).save(tmp_path / "job")
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        read_job(tmp_path / "job")
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        graphft.read_weights(tmp_path / "job")
