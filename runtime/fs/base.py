"""Declares what a checkpoint needs of a file system."""

from __future__ import annotations

import os
import posixpath
import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from graphft.disk.fileio import PIECE, Writer, replacing


class FS(ABC):
    """A file system. Paths are text, with "/" between folders, in the form that the file system itself uses.

    What fails raises OSError, FileNotFoundError where something is not there. A subclass gives the abstract methods;
    the tests of `tests/fs/` say what they must do.
    """

    @abstractmethod
    def ls_dir(self, path: str) -> list[str]:
        """Names of all that is in a folder, in order. Empty if the folder is not there."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is no such file."""

    def stat(self, path: str) -> bool:
        """True if a file or folder is there."""
        return self.size(path) is not None or bool(self.ls_dir(path))

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """A file, to be read, and closed then."""

    @abstractmethod
    def mkdir(self, path: str) -> None:
        """Makes a folder, and those above it. Nothing happens if it is there, or where folders are not made."""

    @abstractmethod
    def writing(self, path: str) -> AbstractContextManager[Writer]:
        """Yields what takes the content of the file, which is there durably at the end; after an exception it is
        not."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Makes a file with this content, whole and durably, if there is none; False if there is one.

        Of several that create the same file at the same time, one does.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Deletes a file, or a folder and all that is in it. Nothing happens if there is none."""

    def upload(self, local_path: str | os.PathLike[str], path: str) -> None:
        """Copies a local file, or a folder with all that is in it."""
        source = Path(local_path)
        if source.is_dir():
            self.mkdir(path)
            for inner in sorted(source.iterdir()):
                self.upload(inner, posixpath.join(path, inner.name))
            return
        with source.open("rb") as file, self.writing(path) as target:
            shutil.copyfileobj(file, target, PIECE)

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
        with self.open(path) as file, replacing(target) as written:
            shutil.copyfileobj(file, written, PIECE)
