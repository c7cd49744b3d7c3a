"""Processes that user code forks while it makes an item: each ends where that code ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def forks_end_here() -> Iterator[None]:
    """A process that was forked inside, and leaves the block, ends with the status that it would have had alone.

    It is a copy of a trainer, with its connections: it must neither go on as one, nor wait for ever as a thread of one.
    """
    here = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != here:
            os._exit(_status(error))
        raise
    if os.getpid() != here:
        os._exit(0)


def _status(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
