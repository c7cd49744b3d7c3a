"""One process at a time has a folder, also where it is deleted meanwhile; that is done whole, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
from pathlib import Path

import pytest

from graphft.disk.fileio import remove_folder
from graphft.errors import GraphftError
from graphft.runtime.process import folder_lock
from graphft.runtime.process.folder_lock import locked


def test_a_lock_of_a_deleted_file_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    first = contextlib.ExitStack()
    first.enter_context(locked(folder))

    def deleted(holder: str) -> None:
        shutil.rmtree(folder)
        first.close()

    with locked(folder, deleted):
        assert (folder / "launcher.lock").exists(), "it has made a new one, which others find"
        with pytest.raises(GraphftError, match="pid"), locked(folder):
            pass
    with locked(folder):
        pass


def test_who_waits_can_be_told_to_end(tmp_path: Path) -> None:
    told: list[str] = []

    def look() -> None:
        raise KeyboardInterrupt

    with locked(tmp_path):
        with pytest.raises(KeyboardInterrupt), locked(tmp_path, told.append, look=look):
            pass
        assert len(told) == 1
    with locked(tmp_path):
        pass


def test_who_only_looks_does_not_refuse_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path):
        pass
    with (tmp_path / "launcher.lock").open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        monkeypatch.setattr(folder_lock, "PEEKS", 1_000_000)
        threading.Timer(0.1, lambda: fcntl.flock(looks, fcntl.LOCK_UN)).start()
        with locked(tmp_path):
            pass


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
