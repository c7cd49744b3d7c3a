"""What a file was when it was described, so that one that was changed since is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import IO, Any

from graphft.data_fingerprint import DIGITS, digest

MARKS = ("ETag", "etag", "e_tag", "md5Hash", "CRC", "mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems tell of a file that changes with it, the best first."""
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Stamp:
    """`size` in bytes; `mark`: the ETag or modification time, as `name value`, "" where there is none; `checksum` of
    the whole content, where it was read; `footer`: a digest of a Parquet file's."""

    size: int
    mark: str = ""
    checksum: str = ""
    footer: str = ""

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @staticmethod
    def from_json(data: list[Any]) -> Stamp:
        return Stamp(int(data[0]), *map(str, data[1:]))

    @property
    def fingerprint(self) -> str:
        return digest(f"{self.size} {self.checksum or self.mark} {self.footer}")


def stamp_of(opened: Any, file: IO[bytes]) -> Stamp:
    """Size and mark of a file that fsspec opened; leaves it at its beginning. Local files cost a system call, others
    what their file system takes to describe one: at most a request."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        return Stamp(size, f"mtime {os.fstat(file.fileno()).st_mtime_ns}")
    except (AttributeError, io.UnsupportedOperation):
        return Stamp(size, mark_of(getattr(file, "details", None) or opened.fs.info(opened.path)))


def settle(file: IO[bytes]) -> None:
    """Makes later changes of a local file show in its modification time, also those of a process that has mapped it
    into its memory: pages that this process has changed already do so only when they have gone to the disk."""
    with contextlib.suppress(AttributeError, OSError):  # no local file: it has no such pages
        os.fsync(file.fileno())


def mark_of(info: Mapping[str, Any]) -> str:
    found = next((name for name in MARKS if info.get(name)), None)
    return f"{found} {info[found]}" if found is not None else ""


class HashedFile:
    """A binary file that is read line by line from its beginning, with the checksum of what was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._made = file, hashlib.sha256()

    def readline(self) -> bytes:
        line = self._file.readline()
        self._made.update(line)
        return line

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self._made.update(line)
            yield line

    def rewind(self) -> None:
        self._file.seek(0)
        self._made = hashlib.sha256()

    @property
    def checksum(self) -> str:
        return self._made.hexdigest()[:DIGITS]


def checksum_of(file: IO[bytes]) -> str:
    """Of the whole content; leaves the file at its beginning."""
    made = hashlib.sha256()
    file.seek(0)
    while piece := file.read(PIECE):
        made.update(piece)
    file.seek(0)
    return made.hexdigest()[:DIGITS]


def footer_of(file: IO[bytes]) -> str:
    """A digest of a Parquet file's footer: its schema, and where each column of each row group lies; "" without one."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] not in (b"PAR1", b"PARE") or length + 8 > end:
        return ""
    file.seek(end - 8 - length)
    return digest(file.read(length))
