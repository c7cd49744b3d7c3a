"""What is told of a save that failed: the storage's own error as ours, and a word at exit if nobody has heard of it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphft.errors import GraphftError, describe

if TYPE_CHECKING:
    from graphft.runtime.loop.check_points import Saving

HOPELESS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})
"""Errors of a storage that are no other when it is tried again."""


class StorageFailed(GraphftError, OSError):
    """The storage of the checkpoints refuses, or is not there: an OSError, as the storage's own is."""


class WaitedTooLong(GraphftError, TimeoutError):
    """A checkpoint was not committed in time: a TimeoutError that says which, and what to do."""


def storage_failed(url: str, error: OSError) -> StorageFailed:
    found = StorageFailed(
        f"the checkpoints' storage {url} cannot be used: {describe(error)}",
        rule="storage",
        help="is the path right (a folder or a bucket that is there), and may this process write to it?",
    )
    found.errno = error.errno
    return found


@contextlib.contextmanager
def asking(url: str) -> Iterator[None]:
    """A storage's own errors as ours. Raises StorageFailed."""
    try:
        yield
    except GraphftError:
        raise
    except OSError as error:
        raise storage_failed(url, error) from None  # else tens of frames of a library stand before what is to be read


class Untold:
    """The last save in one place, if it failed: told at exit, unless somebody has waited for it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._last: tuple[Saving, str] | None = None

    def failed(self, saving: Saving, newest: int, error: BaseException) -> None:
        """`newest`: the newest version that this process knows; -1: none."""
        saved = f"nothing newer than version {newest}" if newest >= 0 else "nothing"
        text = f"graphft: the last checkpoint was NOT saved: {saved} was saved in {self.url}: {describe(error)}"
        if self._last is None:
            atexit.register(self._tell)  # runs when the threads that save are over
        self._last = saving, text

    def saved(self) -> None:
        self._last = None

    def _tell(self) -> None:
        if self._last is not None and not self._last[0].told:
            print(self._last[1], file=sys.stderr)
            self._last = None
