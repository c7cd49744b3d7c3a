"""Stores that fsspec reaches by URL: S3, GCS, Azure, HDFS, `memory://` and others."""

from __future__ import annotations

import contextlib
import errno
import posixpath
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

from graphft.disk.fileio import Writer
from graphft.errors import UsageError
from graphft.runtime.fs.base import FS
from graphft.runtime.fs.local import LocalFS

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"})
"""Protocols that have no folders: what would make one makes a bucket of a name that was mistyped."""

_MEMORY = threading.Lock()
"""Held for `memory://`, which looks whether a file is there, and makes it, in two steps."""

PYARROWS = "fsspec.implementations.arrow"
"""The module of fsspec with the file systems of pyarrow; importing it imports that."""


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Turns an error of a store's own package (botocore's EndpointConnectionError), and RuntimeError ("Session is
    closed"), into an OSError: it is tried again. Others of Python's own pass."""
    try:
        yield
    except Exception as error:
        own = type(error).__module__ == "builtins" and type(error) is not RuntimeError
        if isinstance(error, OSError) or own:
            raise
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


class _Wrapped:
    """A file system of fsspec's, or a file that it opened: what its calls raise are OSErrors."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)

        def called(*arguments: Any, **options: Any) -> Any:
            with _as_os_error():
                answer = found(*arguments, **options)
            return _Wrapped(answer) if name == "open" else answer

        return called if callable(found) else found

    def __enter__(self) -> _Wrapped:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FsspecFS(FS):
    """A file system of fsspec's (or of a package for it: s3fs, gcsfs, ...).

    Object stores show a file when it is wholly written, and make a file only if there is none by a conditional put.
    """

    def __init__(self, fs: Any) -> None:
        """`fs`: an `fsspec.AbstractFileSystem`. Its own cache of listings is not used: others write here, too."""
        self.fs = _Wrapped(fs)

    def ls_dir(self, path: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = path.strip("/")  # some name the folder itself
        return sorted(posixpath.basename(name.rstrip("/")) for name in found if name.strip("/") != own)

    def size(self, path: str) -> int | None:
        self.fs.invalidate_cache()
        try:
            found = self.fs.info(path)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def stat(self, path: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(path))

    def open(self, path: str) -> BinaryIO:
        self.fs.invalidate_cache()
        return self.fs.open(path, "rb")

    def mkdir(self, path: str) -> None:
        names = self.fs.protocol
        if not OBJECT_STORES.intersection([names] if isinstance(names, str) else names):
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
            with _MEMORY if self.fs.protocol == "memory" else contextlib.nullcontext():
                self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def delete(self, path: str) -> None:
        is_file = self.size(path) is not None
        if is_file or self.stat(path):
            self.fs.rm_file(path) if is_file else self.fs.rm(path, recursive=True)

    def _give_up(self, file: Any, path: str) -> None:
        """A file that was written in part is not to come to be."""
        from fsspec.spec import AbstractBufferedFile

        with contextlib.suppress(Exception):  # the error that led here is the one to tell of
            file.discard()
        with contextlib.suppress(Exception):
            if isinstance(file._inner, AbstractBufferedFile):
                file._inner.closed = True  # else it would be written when it is collected
            else:
                file.close()
                self.delete(path)


class RenamingFS(FsspecFS):
    """A file system of pyarrow's, which has no put if there is none: a file is made whole by a rename, which is atomic.

    But pyarrow's rename replaces a file that is there: two processes that create the same file in the same moment are
    not told apart, and the later one's is there then.
    """

    def open(self, path: str) -> BinaryIO:
        file: Any = super().open(path)
        if not hasattr(file._inner, "readinto"):  # fsspec before 2026.9
            file._inner.readinto = file._inner.stream.readinto
        return cast(BinaryIO, file)

    def create(self, path: str, data: bytes) -> bool:
        scratch = f"{path}.{uuid.uuid4().hex}.new"
        with self.writing(scratch) as file:
            file.write(data)
        if self.size(path) is not None:
            self.delete(scratch)
            return False
        self.fs.mv(scratch, path)
        return True


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
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be used: {error}",
            rule="storage-url",
            help="give a path, or a URL that fsspec knows, and install what it needs: a package; for hdfs:// Java and "
            "Hadoop's client, and set HADOOP_HOME and CLASSPATH",
        ) from error
    return (RenamingFS if type(fs).__module__ == PYARROWS else FsspecFS)(fs), inner
