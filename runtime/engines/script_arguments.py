"""The arguments of a script that another machine is to run, as a command's option gives them."""

from __future__ import annotations

import shlex

from graphft.errors import UsageError


def words(text: str) -> list[str]:
    """Of an --args. Raises UsageError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--args is {text!r}, expected words as a shell reads them: {error}", rule="option", help="quote it whole"
        ) from error
