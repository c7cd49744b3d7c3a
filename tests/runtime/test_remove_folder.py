"""Folders that are deleted whole, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graphft.disk.fileio import remove_folder
from graphft.errors import GraphftError
from graphft.runtime.coordination.run_record import forget_own_etcd


def data_of(folder: Path) -> Path:
    for name in ("wal", "snap"):
        (folder / "member" / name).mkdir(parents=True)
        (folder / "member" / name / "0").write_bytes(b"0")
    return folder


def test_what_is_killed_while_it_deletes_leaves_nothing_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an etcd without its log and with its snapshot, reads are answered and writes never."""
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


def test_an_etcd_that_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_of(tmp_path / "etcd")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError("not allowed")))
    with pytest.raises(GraphftError, match="nothing was changed"):
        forget_own_etcd(tmp_path)
    assert (tmp_path / "etcd" / "member" / "wal" / "0").exists()
