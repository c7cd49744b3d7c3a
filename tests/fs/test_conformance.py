"""All file systems do the same: the local one, and those by fsspec and pyarrow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import LocalFileSystem

from graphft.errors import GraphftError
from graphft.runtime.fs import FS, FsspecFS, LocalFS, file_system
from graphft.runtime.fs.by_url import RenamingFS
from tests.support.creating import create_together
from tests.support.hdfs_server import MISSING, hdfs_server


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FS]:
    if MISSING:
        pytest.skip(MISSING)
    with hdfs_server(tmp_path_factory.mktemp("hdfs")) as port:
        yield file_system(f"hdfs://127.0.0.1:{port}/")[0]


@pytest.fixture(params=["local", "memory", "arrow", "hdfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FS, str]]:
    """A file system, and a folder of it that is not there yet."""
    if request.param == "hdfs":
        yield request.getfixturevalue("hdfs"), f"/{uuid.uuid4().hex}/folder"
        return
    if request.param == "memory":
        yield FsspecFS(fsspec.filesystem("memory")), f"/{uuid.uuid4().hex}/folder"
        return
    yield (
        (LocalFS() if request.param == "local" else RenamingFS(ArrowFSWrapper(LocalFileSystem()))),
        str(tmp_path / "folder"),
    )


def write(fs: FS, path: str, *pieces: bytes) -> None:
    with fs.writing(path) as file:
        for piece in pieces:
            file.write(piece)


def read(fs: FS, path: str) -> bytes:
    with fs.open(path) as file:
        return file.read()


def test_files_are_written_read_and_listed(place: tuple[FS, str]) -> None:
    fs, root = place
    assert (fs.ls_dir(root), fs.stat(root)) == ([], False)
    fs.mkdir(root)
    write(fs, f"{root}/b", b"two", memoryview(b" pieces"))
    write(fs, f"{root}/inner/a", b"")
    assert read(fs, f"{root}/b") == b"two pieces"
    assert fs.ls_dir(root) == ["b", "inner"]
    assert [fs.size(f"{root}/{name}") for name in ("b", "inner/a", "inner", "nothing")] == [10, 0, None, None]
    assert [fs.stat(f"{root}/{name}") for name in ("b", "inner", "nothing")] == [True, True, False]
    write(fs, f"{root}/b", b"new")
    assert read(fs, f"{root}/b") == b"new"
    fs.delete(f"{root}/nothing")
    fs.delete(f"{root}/b")
    assert fs.ls_dir(root) == ["inner"]
    fs.delete(f"{root}/inner")
    assert fs.ls_dir(root) == []
    with pytest.raises(FileNotFoundError):
        fs.open(f"{root}/nothing")


def test_parts_of_a_file_can_be_read(place: tuple[FS, str]) -> None:
    fs, root = place
    write(fs, f"{root}/a", bytes(range(100)))
    with fs.open(f"{root}/a") as file:
        file.seek(40)
        into = bytearray(10)
        assert file.readinto(into) == 10  # type: ignore[attr-defined]
    assert bytes(into) == bytes(range(40, 50))


def test_what_fails_while_it_is_written_does_not_come_to_be(place: tuple[FS, str]) -> None:
    fs, root = place

    def fail() -> None:
        with fs.writing(f"{root}/a") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not fs.stat(f"{root}/a")


def test_of_those_that_create_a_file_one_does(place: tuple[FS, str]) -> None:
    fs, root = place
    if isinstance(fs, RenamingFS):
        pytest.skip("pyarrow's rename replaces what is there: RenamingFS says so")
    fs.mkdir(root)
    first = create_together(fs, f"{root}/a")
    assert read(fs, f"{root}/a") == bytes([first])
    assert fs.ls_dir(root) == ["a"], "nothing of the others is left"


def test_a_file_is_created_once(place: tuple[FS, str]) -> None:
    fs, root = place
    fs.mkdir(root)
    assert fs.create(f"{root}/a", b"first")
    assert not fs.create(f"{root}/a", b"late")
    assert (fs.ls_dir(root), read(fs, f"{root}/a")) == (["a"], b"first")


def test_folders_are_copied_there_and_back(place: tuple[FS, str], tmp_path: Path) -> None:
    fs, root = place
    mine = tmp_path / "mine"
    (mine / "inner").mkdir(parents=True)
    (mine / "a").write_bytes(b"1")
    (mine / "inner" / "b").write_bytes(bytes(10 << 20))
    fs.upload(mine, root)
    fs.download(root, tmp_path / "back")
    assert (tmp_path / "back" / "a").read_bytes() == b"1"
    assert (tmp_path / "back" / "inner" / "b").read_bytes() == bytes(10 << 20)
    with pytest.raises(FileNotFoundError):
        fs.download(f"{root}/nothing", tmp_path / "no")


def test_file_systems_by_url(tmp_path: Path) -> None:
    assert isinstance(file_system(str(tmp_path))[0], LocalFS)
    fs, path = file_system(f"file://{tmp_path}")
    assert (type(fs), path) == (LocalFS, str(tmp_path))
    fs, path = file_system("memory://some/folder")
    assert (type(fs), path) == (FsspecFS, "/some/folder")
    with pytest.raises(GraphftError, match=r"storage-url.*nosuch") as caught:
        file_system("nosuch://some/folder")
    assert caught.value.rule == "storage-url"


class StoreError(Exception):
    """The package of a store raises this when it does not answer: no OSError."""


class Away(MemoryFileSystem):
    """A store that does not answer. fsspec would give the same object to all who ask."""

    cachable = False

    def _fail(self, *arguments: object, **options: object) -> None:
        raise StoreError("no answer")

    ls = info = _open = pipe_file = rm_file = makedirs = _fail


def test_a_store_that_does_not_answer_is_an_os_error() -> None:
    fs = FsspecFS(Away())

    def write() -> None:
        with fs.writing("/a/b") as file:
            file.write(b"")

    for call in (
        lambda: fs.ls_dir("/a"),
        lambda: fs.size("/a"),
        lambda: fs.open("/a"),
        lambda: fs.create("/a/b", b""),
        lambda: fs.delete("/a"),
        write,
    ):
        with pytest.raises(OSError, match="StoreError: no answer"):
            call()


def test_in_an_object_store_no_folder_is_made() -> None:
    made: list[str] = []

    class Objects(MemoryFileSystem):
        protocol = ("s3", "s3a")
        cachable = False

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            made.append(path)

    fs = FsspecFS(Objects())
    fs.mkdir("/bucket/folder")
    fs.create("/bucket/folder/a", b"1")
    assert read(fs, "/bucket/folder/a") == b"1"
    assert not made
