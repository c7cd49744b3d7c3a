"""What a launcher says to the person who started it, also when it is quiet."""

from __future__ import annotations

import sys


def tell(line: str) -> None:
    """One line on stderr: a program that reads what a script prints is not disturbed. Nothing is raised."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or none: there is nobody to tell
        return
