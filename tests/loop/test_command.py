"""`graphft checkpoint`, as a person uses it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import graphft
from graphft import TrainStatus
from graphft.runtime.cli import main
from tests.loop.loops import Loop

WHOSE = ["(as", "its", "TrainStatus", "had", "them)"]
Says = Callable[..., list[str]]


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
    def said(*arguments: object, status: int = 0) -> list[str]:
        assert main(["checkpoint", *map(str, arguments)]) == status
        captured = capsys.readouterr()
        return (captured.out + captured.err).splitlines()

    return said


def damage(root: Path, version: int) -> Path:
    (path,) = (root / f"checkpoint-{version:08d}").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_list_and_show(root: Path, says: Says) -> None:
    head, newest, oldest = says("list", root)
    assert head.split() == ["version", "saved", "epoch", "step", "offset", "size", "metrics", *WHOSE]
    assert newest.split()[0] == "1"
    assert newest.split()[3:6] == ["2", "14", "2"]
    assert newest.endswith("loss 0.25")
    assert oldest.endswith("loss 0.5")
    shown = "\n".join(says("show", root, "--version", 0))
    assert "model.0.weight  float32 (8, 4)" in shown
    assert f"torch {torch.__version__}" in shown


def test_a_version_whose_manifest_is_lost_is_told(root: Path, says: Says, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing told of it, and a later save deletes what is left."""
    (root / "checkpoint-00000001" / "manifest.json").unlink()
    assert "1  has no manifest" in says("list", root)[-1]
    assert "checkpoint 1: has no manifest" in says("verify", root)[-1]
    assert graphft.load_check_point(Loop().state, str(root)) == TrainStatus(0, 6, 0, {"loss": 0.5})
    assert "newer than what counts is checkpoint 1, which has no manifest" in caplog.text


def test_an_unknown_metric_deletes_nothing(root: Path, says: Says) -> None:
    """The best by a metric that was misspelt was deleted with all the others."""
    assert says("prune", root, "--keep", 1, "--best", "los")[-1].startswith(("deleted: nothing", "keep best='los'"))
    assert len(says("list", root)) == 3


def test_verify_reads_everything(root: Path, says: Says) -> None:
    assert says("verify", root)[0].startswith("checkpoint 1: good")
    path = damage(root, 1)
    bad, good = says("verify", root, status=1)
    assert str(path) in bad
    assert "is not what was written" in bad
    assert good.startswith("checkpoint 0: good")
    says("verify", root, "--version", 0)


def test_export_is_a_state_dict(root: Path, says: Says, tmp_path: Path) -> None:
    says("export", root, tmp_path / "model.safetensors")
    wanted = Loop()
    graphft.load_check_point(wanted.state, str(root))
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.model.state_dict().keys()
    assert all(torch.equal(found[n], v) for n, v in wanted.model.state_dict().items())
    assert "takes one of model, optimizer, schedule" in "\n".join(
        says("export", root, tmp_path / "x", "--object", "nothing", status=2)
    )
    assert "has no tensors at its first level" in "\n".join(
        says("export", root, tmp_path / "x", "--object", "schedule", status=2)
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("form", ["safetensors", "huggingface", "dcp"])
def test_export_says_where_it_cannot_write(root: Path, says: Says, tmp_path: Path, form: str) -> None:
    """The error named the source, and asked whether that was there."""
    (tmp_path / "file").write_text("text")
    for target in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/exported")):
        first, *_, help = says("export", root, target, "--format", form, status=2)
        assert first.startswith(("error[export]: ", "error[usage]: "))
        assert str(target) in first
        assert str(root) not in first
        assert help.startswith("help: give a")
    assert (tmp_path / "file").read_text() == "text"


def test_copy_and_prune(root: Path, says: Says, tmp_path: Path) -> None:
    to = tmp_path / "copy"
    assert [line.split(" (")[0] for line in says("copy", root, to)] == ["checkpoint 0: copied", "checkpoint 1: copied"]
    assert says("copy", root, to)[0] == f"checkpoint 0: {to} has it already"
    for version in (0, 1):
        one, other = (p / f"checkpoint-{version:08d}" for p in (root, to))
        assert {f.name: f.read_bytes() for f in one.iterdir()} == {f.name: f.read_bytes() for f in other.iterdir()}
    assert says("prune", to, "--keep", 1) == ["deleted: 0"]
    assert says("prune", to, "--keep", 1) == ["deleted: nothing"]


def test_copy_goes_on_behind_what_is_damaged_and_repairs_a_copy(root: Path, says: Says, tmp_path: Path) -> None:
    """It ended there: newer ones that were whole were never copied. And a damaged copy was there already."""
    to = tmp_path / "copy"
    before = damage(root, 0)
    zero, one = says("copy", root, to, status=1)
    assert zero.startswith(f"checkpoint 0: NOT copied, {before}")
    assert one.startswith("checkpoint 1: copied (")
    assert not (to / "checkpoint-00000000" / "manifest.json").exists()
    damage(to, 1)
    assert ", as " in says("copy", root, to, status=1)[1]
    assert says("verify", to)[0].startswith("checkpoint 1: good")
    (found,) = (to / "checkpoint-00000001").glob("*.safetensors")
    found.unlink()
    assert "it is missing" in says("copy", root, to, status=1)[1]
    assert says("verify", to)[0].startswith("checkpoint 1: good")


def test_show_has_values_and_takes_the_newest_manifest_that_is_whole(root: Path, says: Says) -> None:
    shown = says("show", root)
    assert "  optimizer.param_groups.0.lr  0.0" in shown
    assert "  schedule.last_epoch  18" in shown
    (root / "checkpoint-00000001" / "manifest.json").write_text("[" * 100_000)
    shown = says("show", root)
    assert shown[0].split()[0] == "0"
    assert "checkpoint-00000001/manifest.json is damaged" in shown[-1]
    assert graphft.load_check_point(Loop().state, root) == TrainStatus(0, 6, 0, {"loss": 0.5})


def test_export_takes_urls_and_overwrites_exports_only(root: Path, says: Says, tmp_path: Path) -> None:
    to = tmp_path / "store"
    assert says("export", root, f"file://{to}/model.safetensors")[-1] == f"uploaded to file://{to}/model.safetensors"
    assert load_file(to / "model.safetensors")
    says("export", root, f"file://{to}/hf")
    assert load_file(to / "hf" / "model.safetensors")
    says("export", root, tmp_path / "m.safetensors")
    says("export", root, tmp_path / "m.safetensors")
    (tmp_path / "notes.safetensors").write_text("mine")
    assert "is no whole safetensors file" in "\n".join(says("export", root, tmp_path / "notes.safetensors", status=2))
    assert "model.pt is named like a file" in "\n".join(says("export", root, tmp_path / "model.pt", status=2))
    assert not (tmp_path / "model.pt").exists()
    assert (tmp_path / "notes.safetensors").read_text() == "mine"


def test_prune_keeps_the_newest_that_is_whole(root: Path, says: Says) -> None:
    """Found under attack: the newest was damaged, and all others were deleted."""
    damage(root, 1)
    assert says("prune", root, "--keep", 1) == ["deleted: nothing"]
    assert "--mode is for --best" in says("prune", root, "--keep", 1, "--mode", "max", status=2)[0]
    assert graphft.load_check_point(Loop().state, str(root)) is not None
    damage(root, 0)
    assert "no checkpoint is whole, so none is deleted" in "\n".join(says("prune", root, "--keep", 1, status=2))


def test_a_copy_that_was_interrupted_and_another_loops(root: Path, says: Says, tmp_path: Path) -> None:
    """Found under attack: both were taken for copies that are there."""
    to = tmp_path / "copy"
    (to / "checkpoint-00000001").mkdir(parents=True)
    (to / "checkpoint-00000001" / "tensors-dead.safetensors").write_bytes(b"half")
    graphft.save_check_point(Loop().state, graphft.TrainStatus(7), str(tmp_path / "another"))
    shutil.copytree(tmp_path / "another" / "checkpoint-00000000", to / "checkpoint-00000000")
    zero, one = says("copy", root, to, status=1)
    assert zero == f"checkpoint 0: NOT copied, {to} has another one of this number"
    assert one.startswith("checkpoint 1: copied")
    assert says("verify", to, "--version", 1)[0].startswith("checkpoint 1: good")


def test_what_is_not_there(tmp_path: Path, says: Says) -> None:
    assert f"there is nothing at {tmp_path / 'nothing'}" in "\n".join(says("list", tmp_path / "nothing", status=2))
    assert "has no checkpoint of a training loop" in "\n".join(says("list", tmp_path, status=2))
    (tmp_path / "step-00000010.g0").mkdir()
    assert "these are the checkpoints of a job" in "\n".join(says("verify", tmp_path, status=2))


def test_import_begins_a_loop_with_weights_from_elsewhere(root: Path, says: Says, tmp_path: Path) -> None:
    """There and back: what was exported is a first checkpoint, which a loop loads by its object's name."""
    says("export", root, tmp_path / "model.safetensors")
    (line,) = says("import", tmp_path / "model.safetensors", tmp_path / "new")
    assert line.startswith(f"{tmp_path / 'new'}: checkpoint 0, ")
    assert "as 'model'" in line
    wanted, found = Loop(), Loop()
    graphft.load_check_point(wanted.state, str(root))
    state = torch.get_rng_state()
    assert graphft.load_check_point({"model": found.model}, str(tmp_path / "new")) == TrainStatus()
    assert torch.equal(torch.get_rng_state(), state), "weights bring no random states along"
    assert all(torch.equal(v, wanted.model.state_dict()[n]) for n, v in found.model.state_dict().items())
    assert says("verify", tmp_path / "new")[0].startswith("checkpoint 0: good")
    with pytest.raises(graphft.GraphftError, match="optimizer is not in the checkpoint"):
        graphft.load_check_point(Loop().state, str(tmp_path / "new"))
    says("import", root, tmp_path / "older", "--version", 0, "--object", "model")
    assert not torch.equal(
        load_file(tmp_path / "model.safetensors")["0.weight"], graphft.read_weights(tmp_path / "older")["0.weight"]
    )


def test_import_never_adds_to_what_is_there(root: Path, says: Says, tmp_path: Path) -> None:
    says("export", root, tmp_path / "model.safetensors")
    before = sorted(path.name for path in root.rglob("*"))
    assert "is not a new place: there is checkpoint-00000000, checkpoint-00000001" in "\n".join(
        says("import", tmp_path / "model.safetensors", root, status=2)
    )
    assert sorted(path.name for path in root.rglob("*")) == before
    says("import", tmp_path / "nothing", tmp_path / "new", status=2)
    assert not (tmp_path / "new").exists()
    says("import", tmp_path / "model.safetensors", tmp_path / "model.safetensors", status=2)
    assert load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("action", ["list", "show", "verify", "prune"])
def test_a_file_is_no_place(says: Says, tmp_path: Path, action: str) -> None:
    (tmp_path / "file").write_text("text")
    more = ["--keep", "1"] if action == "prune" else []
    text = "\n".join(says(action, tmp_path / "file", *more, status=2))
    assert text.startswith("error[storage]"), text
    assert "Not a directory" in text
