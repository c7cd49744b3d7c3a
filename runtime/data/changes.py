"""Files must be what they were when the job was described: one that was changed is refused, at whichever read."""

from __future__ import annotations

import datetime
import io
import os
from collections.abc import Mapping
from typing import IO, Any

from graphft.data_stamps import Stamp, checksum_of, footer_of
from graphft.errors import UsageError

CHANGED = "data-changed"
"""Of errors that neither reading again nor leaving a chunk out can mend."""


_HELP = (
    "put the file back as it was (with its modification time: cp -p, rsync -t), or describe the data and the job again"
)


class DescribedFiles:
    """What the files of a description were. `check` is called with each file that is opened: a comparison of two
    numbers, unless the file was touched since.

    The size decides, then the modification time or ETag. Where these differ the checksum does, if the file was read
    whole when it was described (CSV, JSON lines): the same contents may have been copied, or written once more.
    """

    def __init__(self, stamps: Mapping[str, list[Any]]) -> None:
        self._described = {url: Stamp.from_json(stamp) for url, stamp in stamps.items()}
        self._found: dict[str, Stamp] = {}

    def check(self, url: str, file: IO[bytes], found: Stamp) -> None:
        """Raises GraphftError[data-changed] if the file at `url`, opened as `file`, is another; leaves it at its
        beginning."""
        described = self._described.get(url)
        if described is None or found == self._found.get(url):
            return  # unknown: the job was saved by an older graphft
        what = _difference(described, found, file)
        if what:
            raise UsageError(f"{url} was changed: it {what} when the job was described", rule=CHANGED, help=_HELP)
        file.seek(0)
        self._found[url] = found


def check_unchanged(url: str, file: IO[bytes], before: Stamp, compressed: bool) -> None:
    """Raises GraphftError[data-changed] if a local file was changed since it was opened: what was read of it then may
    be neither the old contents nor the new. (An object of a store is replaced as a whole.) Of a file that is
    decompressed while it is read, the size is not compared: the stamp has that of the contents."""
    try:
        now = os.fstat(file.fileno())
    except (AttributeError, io.UnsupportedOperation):
        return
    found = Stamp(before.size if compressed else now.st_size, f"mtime {now.st_mtime_ns}")
    if (found.size, found.mark) != (before.size, before.mark):
        raise UsageError(f"{url} was changed while it was read", rule=CHANGED, help=_HELP)


def _difference(described: Stamp, found: Stamp, file: IO[bytes]) -> str:
    """What tells the file from the described one; "" if nothing does."""
    if found.size != described.size:
        return f"has {found.size} bytes, {described.size}"
    if found.mark != described.mark and described.checksum:
        checksum = checksum_of(file)
        return "" if checksum == described.checksum else f"has the checksum {checksum}, {described.checksum}"
    if found.mark != described.mark:
        return f"has the {_readable(found.mark)}, {_readable(described.mark)}"
    if described.footer and footer_of(file) != described.footer:
        return "has another footer than"
    return ""


def _readable(mark: str) -> str:
    name, _, value = mark.partition(" ")
    if name != "mtime" or not value.isdecimal():
        return mark or "modification time unknown"
    at = datetime.datetime.fromtimestamp(int(value) / 1e9, datetime.UTC)
    return f"modification time {at.isoformat(sep=' ')}"
