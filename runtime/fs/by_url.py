"""Stores that fsspec reaches by URL: S3, GCS, Azure, HDFS, `memory://` and others."""

from __future__ import annotations

import contextlib
import errno
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from graphft.errors import GraphftError, UsageError
from graphft.runtime.fs.base import FS, Writer
from graphft.runtime.fs.local import LocalFS


class FsspecFS(FS):
    """A file system of fsspec's (or of a package for it: s3fs, gcsfs, ...).

    Object stores show a file when it is wholly written, and make a file only if there is none by a conditional put.
    """

    def __init__(self, fs: Any) -> None:
        """`fs`: an `fsspec.AbstractFileSystem`. Its own cache of listings is not used: others write here, too."""
        self.fs = fs

    def ls_dir(self, path: str) -> list[str]:
        return sorted(name for name, _ in self._entries(path))

    def list_dirs(self, path: str) -> list[str]:
        return sorted(name for name, kind in self._entries(path) if kind == "directory")

    def _entries(self, path: str) -> Iterator[tuple[str, str]]:
        self._forget()
        try:
            found = self.fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in found:
            name = posixpath.basename(entry["name"].rstrip("/"))
            if name and entry["name"].strip("/") != path.strip("/"):  # some name the folder itself
                yield name, entry["type"]

    def size(self, path: str) -> int | None:
        self._forget()
        try:
            found = self.fs.info(path)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def open(self, path: str) -> BinaryIO:
        self._forget()
        return self.fs.open(path, "rb")

    def mkdir(self, path: str) -> None:
        self.fs.makedirs(path, exist_ok=True)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Writer]:
        self.mkdir(posixpath.dirname(path))
        file = self.fs.open(path, "wb")
        try:
            yield file
        except BaseException:
            self._give_up(file, path)
            raise
        file.close()

    def create(self, path: str, data: bytes) -> bool:
        self.mkdir(posixpath.dirname(path))
        try:
            self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def mv(self, src: str, dst: str) -> None:
        if self.stat(dst):
            raise FileExistsError(errno.EEXIST, "cannot move there: it exists", dst)
        self.fs.mv(src, dst, recursive=self.size(src) is None)

    def rm(self, path: str) -> None:
        self.fs.rm_file(path)

    def rmr(self, path: str) -> None:
        self.fs.rm(path, recursive=True)

    def _give_up(self, file: Any, path: str) -> None:
        """A file that was written in part is not to come to be."""
        from fsspec.spec import AbstractBufferedFile

        with contextlib.suppress(Exception):  # the error that led here is the one to tell of
            file.discard()
        with contextlib.suppress(Exception):
            if isinstance(file, AbstractBufferedFile):
                file.closed = True  # else it would be written when it is collected
            else:
                file.close()
                self.rm(path)

    def _forget(self) -> None:
        self.fs.invalidate_cache()


def file_system(path: str, options: Mapping[str, Any] | None = None) -> tuple[FS, str]:
    """The file system of a path or URL, and the path in it. `options` go to fsspec (`storage_options`).

    Raises UsageError[storage-url] for an unknown scheme, or where the package for it is missing.
    """
    if "://" not in path and "::" not in path:
        return LocalFS(), path
    import fsspec

    if path.startswith(("file://", "local://")):
        return LocalFS(), fsspec.core.strip_protocol(path)
    try:
        fs, inner = fsspec.core.url_to_fs(path, **dict(options or {}))
    except ImportError as error:
        raise GraphftError(
            f"{path} cannot be used: {error}", rule="storage-url", help="install that package"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{path} cannot be used: {error}", rule="storage-url", help="give a path, or a URL that fsspec knows"
        ) from error
    return FsspecFS(fs), inner
