"""Files that hold the old or the new content, whenever the machine stops."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_NO_FSYNC = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EROFS)
PIECE = 8 << 20
"""Bytes that are read, written or hashed at a time. Each piece is one call that gives the interpreter's lock up."""
_REMOVED = ".removed"


class Writer(Protocol):
    """Takes a file's bytes, one piece after the other."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class PieceWriter:
    """Writes bytes to a descriptor, PIECE at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview) -> None:
        """Raises OSError; of what was written up to then, the file has the beginning."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            view = view[os.write(self._descriptor, view[:PIECE]) :]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[PieceWriter]:
    """Yields what takes the new content of `path`, whole, at the end: fsynced, renamed, its folder fsynced.

    Makes the folder if needed. After an exception `path` is what it was. Raises OSError.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            yield PieceWriter(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # an error before is the one to tell of
            temporary.unlink(missing_ok=True)
    fsync(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `path`, making its folder if needed: under a temporary name, fsynced, renamed."""
    with replacing(path) as file:
        file.write(data)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it that are missing; the entry of each is on the disk then.

    So is that of the first one that is there: who made it may have ended before it could see to that. Raises OSError.
    """
    missing, there = [], folder
    while not there.exists():
        missing.append(there)
        there = there.parent
    try:
        fsync(there.parent)
    except OSError as error:  # of a mount, say: not to be read by this user, or of a kind that keeps nothing
        if error.errno not in _NO_FSYNC:
            raise
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        fsync(new.parent)
    if not folder.is_dir():
        if not folder.exists():
            raise FileNotFoundError(f"{folder} was deleted in the moment in which it was made")
        raise NotADirectoryError(f"{folder} is a file, not a folder")


def remove_folder(folder: Path) -> None:
    """Deletes a folder, if it is there; all of it, or none: what a kill leaves has another name, and the next call
    deletes it. In the place of a link's folder there is an empty one then. Raises OSError."""
    place = folder.resolve()
    if place.is_dir():
        place.rename(place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}{_REMOVED}"))
        if folder.is_symlink():
            place.mkdir()
        fsync(place.parent)
    for rest in place.parent.glob(f".{place.name}.*{_REMOVED}"):
        shutil.rmtree(rest)


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Makes a new folder beside `target` and on its file system, which is deleted at the end. Raises OSError."""
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
    ) as scratch:
        yield Path(scratch)


def fsync(path: Path) -> None:
    """Has the file system write a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tensor_file_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata in the header of a safetensors file; without torch. Raises OSError, ValueError."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return dict(header.get("__metadata__", {}))


def size_in_words(count: int) -> str:
    """Returns bytes for a person: 512 B, 3.2 KB (of 1,000 B), 1.2 GB."""
    size, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1e3, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
