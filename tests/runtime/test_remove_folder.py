"""Folders that are deleted whole, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graphft.disk.fileio import remove_folder


def data_of(folder: Path) -> Path:
    for name in ("wal", "snap"):
        (folder / "member" / name).mkdir(parents=True)
        (folder / "member" / name / "0").write_bytes(b"0")
    return folder


def test_what_is_killed_while_it_deletes_leaves_nothing_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_of(tmp_path / "etcd")

    def killed(path: Path) -> None:
        (path / "member" / "wal" / "0").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_folder(folder)
    assert not folder.exists()
    remove_folder(folder)
    assert list(tmp_path.iterdir()) == []
