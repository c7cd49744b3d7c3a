"""Whatever is flipped, cut off, lost or exchanged is found, named, and an older version is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import graphft
from graphft import TrainStatus
from graphft.errors import GraphftError
from tests.loop.loops import Loop

VERSIONS = 3


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damage") / "original"
    loop = Loop()
    for number in range(VERSIONS):
        graphft.save_check_point(loop.state, TrainStatus(number), str(root))
    return root


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def newest_of(root: Path) -> int:
    status = graphft.load_check_point(Loop().state, str(root))
    assert status is not None
    return status.epoch_no


def files_of(root: Path, version: int) -> list[Path]:
    return sorted((root / f"checkpoint-{version:08d}").iterdir())


def test_every_flip_and_every_cut_is_found(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    pick = random.Random(3)
    files = files_of(copy, VERSIONS - 1)
    for _ in range(200):
        path = pick.choice(files)
        whole = path.read_bytes()
        place = pick.randrange(len(whole))
        if pick.random() < 0.8:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << pick.randrange(8))]) + whole[place + 1 :])
        else:
            path.write_bytes(whole[:place])
        caplog.clear()
        assert newest_of(copy) == VERSIONS - 2, (path.name, place)
        assert str(path) in caplog.text
        assert f"going back to {copy}/checkpoint-{VERSIONS - 2:08d}" in caplog.text
        path.write_bytes(whole)
    assert newest_of(copy) == VERSIONS - 1


def test_a_file_of_another_checkpoint(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest, tensors = files_of(copy, VERSIONS - 1)
    other_manifest, other_tensors = files_of(copy, 0)
    shutil.copy(other_tensors, tensors)
    assert newest_of(copy) in (VERSIONS - 1, VERSIONS - 2), "the same bytes are no damage"
    shutil.copy(other_manifest, manifest)
    assert newest_of(copy) == VERSIONS - 2
    assert "is the manifest of checkpoint-00000000" in caplog.text


def test_if_all_are_damaged_that_is_an_error(copy: Path) -> None:
    for version in range(VERSIONS):
        files_of(copy, version)[1].write_bytes(b"")
    loop = Loop()
    with pytest.raises(GraphftError, match="none of 3 checkpoints that were read is whole") as caught:
        graphft.load_check_point(loop.state, str(copy))
    assert caught.value.rule == "checkpoint"


def test_storage_that_fails_is_no_damage(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(graphft.LocalFS, "open", away)
    with pytest.raises(OSError, match="Input/output error"):
        graphft.load_check_point(Loop().state, str(copy))
