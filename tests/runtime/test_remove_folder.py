"""Folders that are deleted whole, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphft.disk.fileio import remove_folder, scratch_folder
from graphft.errors import GraphftError
from graphft.runtime.coordination.stale_run import forget_own_etcd


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


def test_a_link_stays(tmp_path: Path) -> None:
    data_of(tmp_path / "disk" / "etcd")
    (tmp_path / "etcd").symlink_to(tmp_path / "disk" / "etcd")
    remove_folder(tmp_path / "etcd")
    assert list((tmp_path / "etcd").iterdir()) == []
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["etcd"]


def test_an_etcd_that_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_of(tmp_path / "etcd")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError("not allowed")))
    with pytest.raises(GraphftError, match="nothing was changed"):
        forget_own_etcd(tmp_path)
    assert (tmp_path / "etcd" / "member" / "wal" / "0").exists()


KILLED = """
import os, sys
from pathlib import Path
from graphft.disk.fileio import scratch_folder
with scratch_folder(Path(sys.argv[1])) as scratch:
    (scratch / "job").mkdir()
    print(scratch.name, flush=True)
    sys.stdin.read()
"""


def test_what_was_killed_before_it_had_its_name_is_deleted_by_the_next(tmp_path: Path) -> None:
    """A run that was killed while it carried rows over left a folder, each time another one."""
    target = tmp_path / "lin-2"
    for name in (".lin-2.checkpts", ".lin-2.0123abcdef", ".lin.01234567", ".lin-2.removed"):
        (tmp_path / name / "kept").mkdir(parents=True)
    kept = {path.name for path in tmp_path.iterdir()}
    killed, lives = (
        subprocess.Popen([sys.executable, "-c", KILLED, str(target)], stdin=-1, stdout=-1, text=True) for _ in range(2)
    )
    assert killed.stdout is not None
    assert lives.stdout is not None
    left, held = killed.stdout.readline().strip(), lives.stdout.readline().strip()
    killed.kill()
    killed.communicate()
    try:
        assert {path.name for path in tmp_path.iterdir()} == kept | {left, held}
        with scratch_folder(target) as scratch:
            (scratch / "job").mkdir()
            assert {path.name for path in tmp_path.iterdir()} == kept | {held, scratch.name}
            (scratch / "job").rename(target)
        assert {path.name for path in tmp_path.iterdir()} == kept | {held, "lin-2"}
    finally:
        lives.communicate()
    assert {path.name for path in tmp_path.iterdir()} == kept | {"lin-2"}


def test_a_folder_that_cannot_be_held_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has taken it for one that was left, in the moment in which it was made."""
    real, gone = os.open, list[str]()

    def late(path: str | Path, *rest: int) -> int:
        if not gone:
            gone.append(Path(path).name)
            Path(path).rmdir()
        return real(path, *rest)

    monkeypatch.setattr(os, "open", late)
    with scratch_folder(tmp_path / "a") as scratch:
        assert scratch.is_dir()
        assert gone
        assert scratch.name not in gone
