"""`graphft checkpoint`, as a person uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import graphft
from graphft import TrainStatus
from graphft.runtime.cli import main
from tests.loop.loops import Loop
from tests.support.eager import same

Says = Callable[..., str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints of a loop."""
    loop, path = Loop(), tmp_path / "saved"
    graphft.save_check_point(loop.state, TrainStatus(0, 6, 0, {"loss": 0.5}), str(path))
    loop.train(None)
    graphft.save_check_point(loop.state, TrainStatus(1, 14, 2, {"loss": 0.25}), str(path))
    return path


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    def said(*arguments: object, status: int = 0) -> str:
        assert main(["checkpoint", *map(str, arguments)]) == status
        captured = capsys.readouterr()
        return str(captured.out + captured.err)

    return said


def test_list_and_show(root: Path, says: Says) -> None:
    head, newest, oldest = says("list", root).splitlines()
    assert head.split()[:3] == ["version", "saved", "size"]
    assert newest.split()[0] == "1"
    assert newest.endswith("epoch 2, step 14, offset 2  loss 0.25")
    assert oldest.endswith("loss 0.5")
    shown = says("show", root, "--version", 0)
    assert "model.0.weight  float32 (8, 4)" in shown
    assert f"torch {torch.__version__}" in shown


def test_a_version_whose_manifest_is_lost_is_told(root: Path, says: Says, caplog: pytest.LogCaptureFixture) -> None:
    (root / "checkpoint-00000001" / "manifest.json").unlink()
    assert "checkpoint-00000001 has no manifest" in says("list", root)
    assert "checkpoint-00000001: has no manifest" in says("verify", root)
    assert graphft.load_check_point(Loop().state, str(root)) == TrainStatus(0, 6, 0, {"loss": 0.5})
    assert "newer than what counts is checkpoint-00000001, which has no manifest" in caplog.text


def test_verify_reads_everything(root: Path, says: Says) -> None:
    assert says("verify", root).startswith(f"{root}/checkpoint-00000001: good")
    (path,) = (root / "checkpoint-00000001").glob("*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    bad, good = says("verify", root, status=1).splitlines()
    assert str(path) in bad
    assert "is not what was written" in bad
    assert good.startswith(f"{root}/checkpoint-00000000: good")
    says("verify", root, "--version", 0)


def test_export_is_a_state_dict(root: Path, says: Says, tmp_path: Path) -> None:
    says("export", root, tmp_path / "model.safetensors")
    wanted = Loop()
    graphft.load_check_point(wanted.state, str(root))
    assert same(load_file(tmp_path / "model.safetensors"), wanted.model.state_dict())
    for name, told in (("nothing", "it has model, optimizer"), ("schedule", "has no tensors at its first level")):
        assert told in says("export", root, tmp_path / "x", "--object", name, status=2)
    assert not (tmp_path / "x").exists()


def test_export_takes_urls_and_overwrites_nothing(root: Path, says: Says, tmp_path: Path) -> None:
    to = tmp_path / "store"
    for status in (0, 2):
        says("export", root, f"memory://{to}/model.safetensors", status=status)
    says("export", root, f"file://{to}/hf")
    assert load_file(to / "hf" / "model.safetensors")
    (tmp_path / "notes.safetensors").write_text("mine")
    assert "is there already" in says("export", root, tmp_path / "notes.safetensors", status=2)
    assert "model.pt is named like a file" in says("export", root, tmp_path / "model.pt", status=2)
    assert says("export", root, tmp_path / "notes.safetensors" / "x", status=2).startswith("error[export]")
    assert (tmp_path / "notes.safetensors").read_text() == "mine"


def test_show_takes_the_newest_manifest_that_is_whole(root: Path, says: Says) -> None:
    (root / "checkpoint-00000001" / "manifest.json").write_text("[" * 100_000)
    assert says("show", root).split()[0] == "0"


def test_what_is_not_there(tmp_path: Path, says: Says) -> None:
    assert f"there is nothing at {tmp_path / 'nothing'}" in says("list", tmp_path / "nothing", status=2)
    assert "has no checkpoint" in says("list", tmp_path, status=2)
    (tmp_path / "file").write_text("text")
    assert says("list", tmp_path / "file", status=2).startswith("error[storage]")
