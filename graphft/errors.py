"""Errors that say what, where, expected against got, and the remedy.

Every error that graphft raises on purpose is a `GraphftError`. One that concerns a program also carries the place
(program, block, op index) and prints the lines around it, as a compiler does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

if TYPE_CHECKING:
    from graphft.ir import Block

P = ParamSpec("P")
T = TypeVar("T")
LISTED = 5
"""A message names so many of a long list."""
TEXT_LIMIT = 2000
"""Characters of a text of unknown origin (an exception's, say) that a record, an event or an error holds."""
_NOTE = 50
"""More than the characters of the note about what was left out."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def plain_text(text: str, limit: int = TEXT_LIMIT) -> str:
    """Returns a text of unknown origin as etcd, JSON, logs and terminals take it.

    What UTF-8 cannot hold (lone surrogates) and control characters but tab and line end are written as escapes. Of a
    text that has more than `limit` characters then the beginning and the end are kept.
    """
    encodable = text.encode("utf-8", "backslashreplace").decode()
    made = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", encodable)
    if len(made) <= limit:
        return made
    head, tail = limit * 2 // 3, limit // 3 - _NOTE
    return f"{made[:head]} [... {len(made) - head - tail} characters left out ...] {made[-tail:]}"


def plain(value: Any, limit: int = TEXT_LIMIT) -> Any:
    """Returns `value` with every text in it plain; what JSON does not know becomes its text."""
    if isinstance(value, dict):
        return {plain_text(str(k)): plain(v, limit) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, limit) for v in value]
    return value if value is None or isinstance(value, bool | int | float) else plain_text(str(value), limit)


def listed(names: Sequence[object], separator: str = ", ", total: int = 0) -> str:
    """Returns `a, b, c`, of many the first ones; `total`: how many there are, if these are not all."""
    more = max(total, len(names)) - LISTED
    return separator.join(map(str, names[:LISTED])) + f" and {more} more" * (more > 0)


def ordinal(number: int) -> str:
    """Returns "1st", "2nd", "3rd", "4th", ..., "11th", ..., "21st"."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def describe(error: BaseException) -> str:
    """Returns type and text of an exception of unknown origin, whatever its `__str__` does; short enough to be quoted.

    Of an error of ours its message.
    """
    if isinstance(error, GraphftError):
        return plain_text(error.message, TEXT_LIMIT * 3 // 4)
    try:
        text = str(error)
    except BaseException as broken:  # KeyboardInterrupt, too, which would end the process without a word of the error
        text = f"<its __str__ raised {type(broken).__name__}>"
    return plain_text(f"{type(error).__name__}: {text}", TEXT_LIMIT * 3 // 4)


class GraphftError(Exception):
    """Base of graphft's errors. `rule` is a stable identifier, `help` the remedy."""

    exit_status: ClassVar[int] = 1
    """Exit status of a process that ends with it: a failure; what starts the process may try again."""

    def __init__(self, message: str, *, rule: str = "", help: str = "") -> None:
        self.message, self.rule, self.help = message, rule, help
        super().__init__(self.render())

    def place(self) -> list[str]:
        """Returns lines that show where it is."""
        return []

    def render(self) -> str:
        head = f"error[{self.rule}]: {self.message}" if self.rule else self.message
        return "\n".join([head, *self.place(), *([f"help: {self.help}"] if self.help else [])])


class UsageError(GraphftError):
    """Starting the process again cannot mend it: options, a folder, an address, data, or the machine are wrong."""

    exit_status = 2


class ProgramError(GraphftError):
    """An error at a place in a program. `after` is the pass behind which it was found, if one was."""

    def __init__(
        self,
        message: str,
        *,
        block: Block | None = None,
        index: int | None = None,
        rule: str = "",
        help: str = "",
        after: str = "",
    ) -> None:
        self.block, self.index, self.after = block, index, after
        super().__init__(message, rule=rule, help=help)

    def place(self) -> list[str]:
        return self.block.excerpt(self.index, self.after) if self.block is not None else []


def without_traceback(error: BaseException) -> None:
    """Has a script that does not catch this error print its message only: where graphft found it is no help.

    Not with GRAPHFT_DEBUG, and not where something else (a notebook, a debugger) shows errors.
    """
    ours = getattr(sys.excepthook, "of_graphft", False)
    if os.environ.get("GRAPHFT_DEBUG") or not (ours or sys.excepthook is sys.__excepthook__):
        return

    def show(kind: type[BaseException], found: BaseException, where: TracebackType | None) -> None:
        if found is not error:
            sys.__excepthook__(kind, found, where)
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):  # there is nobody to tell
            print(found, file=sys.stderr, flush=True)

    show.of_graphft = True  # type: ignore[attr-defined]
    sys.excepthook = show


def shown_plainly(function: Callable[P, T]) -> Callable[P, T]:
    """Has a script that does not catch an error of this function end with its message, without graphft's frames."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except GraphftError as error:
            without_traceback(error)
            raise

    return wrapped
