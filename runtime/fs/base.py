"""What a checkpoint needs of a file system.

The names are those of the design "Fault tolerance for sync training" (PaddlePaddle's fs_wrapper). `size`, `open`,
`writing` and `create` are what integrity and commits need beyond it.
"""

from __future__ import annotations

import os
import posixpath
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

PIECE = 8 << 20
"""Bytes that are copied at a time."""


class Writer(Protocol):
    """Takes a file's bytes, one piece after the other."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class FS(ABC):
    """A file system. Paths are text, with "/" between folders, in the form that the file system itself uses.

    What fails raises OSError, FileNotFoundError where something is not there. A subclass gives the abstract methods;
    the tests of `tests/fs/` say what they must do.
    """

    # -- looking ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def list_dirs(self, path: str) -> list[str]:
        """Names of the folders in a folder, in order. Empty if the folder is not there."""

    @abstractmethod
    def ls_dir(self, path: str) -> list[str]:
        """Names of all that is in a folder, in order. Empty if the folder is not there."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is no such file."""

    def stat(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return self.size(path) is not None or bool(self.ls_dir(path))

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of all files below a folder, by their paths in it. Files that are deleted meanwhile are left out."""
        found: dict[str, int] = {}
        for name in self.ls_dir(path):
            inner = posixpath.join(path, name)
            size = self.size(inner)
            below = {"": size} if size is not None else self.sizes(inner)
            found |= {posixpath.join(name, rest).rstrip("/"): count for rest, count in below.items()}
        return found

    def missing_bucket(self, path: str) -> str:
        """Of an object store, the bucket of this path, if it is not there or may not be listed: it has nothing then, as
        an empty one. Else ""."""
        return ""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """A file, to be read, and closed then."""

    # -- changing ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def mkdir(self, path: str) -> None:
        """Makes a folder, and those above it. Nothing happens if it is there, or where folders are not made."""

    @abstractmethod
    def writing(self, path: str) -> AbstractContextManager[Writer]:
        """What is written inside is the file's content at the end, durably. After an exception it is not."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Makes a file with this content, whole and durably, if there is none; False if there is one.

        Of several that create the same file at the same time, one does.
        """

    @abstractmethod
    def mv(self, src: str, dst: str) -> None:
        """Gives a file or folder another name. FileExistsError if that is taken."""

    @abstractmethod
    def rm(self, path: str) -> None:
        """Deletes a file."""

    @abstractmethod
    def rmr(self, path: str) -> None:
        """Deletes a folder and all that is in it."""

    def delete(self, path: str) -> None:
        """Deletes a file or a folder. Nothing happens if there is none."""
        if self.size(path) is not None:
            self.rm(path)
        elif self.stat(path):
            self.rmr(path)

    # -- copying ----------------------------------------------------------------------------------------------------

    def need_upload_download(self) -> bool:
        """Whether other programs reach these files only by `upload` and `download`."""
        return True

    def upload(self, local_path: str | os.PathLike[str], path: str) -> None:
        """Copies a local file, or a folder with all that is in it."""
        source = Path(local_path)
        if source.is_dir():
            self.mkdir(path)
            for inner in sorted(source.iterdir()):
                self.upload(inner, posixpath.join(path, inner.name))
            return
        with source.open("rb") as file, self.writing(path) as target:
            _copy(file, target)

    def download(self, path: str, local_path: str | os.PathLike[str]) -> None:
        """Copies a file, or a folder with all that is in it, to the local disk."""
        target = Path(local_path)
        if self.size(path) is None:
            if not self.stat(path):
                raise FileNotFoundError(f"{path} is not there")
            target.mkdir(parents=True, exist_ok=True)
            for name in self.ls_dir(path):
                self.download(posixpath.join(path, name), target / name)
            return
        from graphft.disk.fileio import replacing

        with self.open(path) as file, replacing(target) as written:
            _copy(file, written)


def _copy(file: BinaryIO, target: Writer) -> None:
    while piece := file.read(PIECE):
        target.write(piece)
