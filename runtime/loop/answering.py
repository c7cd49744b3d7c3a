"""A storage's first answer is waited for with a word, and not for ever."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("graphft")

WORD_SECONDS, ANSWER_SECONDS = 5.0, 30.0
"""After how long without an answer that is told; and is an error."""

T = TypeVar("T")


class Unanswered(TimeoutError):
    """The storage takes requests, and does not answer."""


def answered(question: Callable[[], T], url: str) -> T:
    """What `question`, which changes nothing, returns or raises. Its thread is left alone when it takes too long: a
    library of a store may try for many minutes. Raises Unanswered."""
    found: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            found.append(question())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name=f"asks {url}", daemon=True)
    thread.start()
    thread.join(WORD_SECONDS)
    if thread.is_alive():
        log.warning("%s has not answered for %.0f s; waiting for it", url, WORD_SECONDS)
        thread.join(ANSWER_SECONDS - WORD_SECONDS)
    if errors:
        raise errors[0]
    if not found:
        raise Unanswered(errno.ETIMEDOUT, f"it has not answered for {ANSWER_SECONDS:.0f} s")
    return found[0]
