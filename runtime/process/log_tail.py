"""The end of a process's log: for the error that tells people why it died."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graphft.errors import plain_text

ERROR_LINES = 60
"""Of the end of a log, in which the last error is looked for."""


def last_lines(path: Path, count: int) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-count:] if path.exists() else []


def error_in(lines: Sequence[str]) -> str:
    """The last of our errors in these lines, on one line, behind a colon; with the remedy that follows it. "": none."""
    found = [i for i, line in enumerate(lines) if "error[" in line]
    if not found:
        return ""
    error, *rest = lines[found[-1] :]
    remedy = next((f" ({line})" for line in rest[:1] if line.startswith("help: ")), "")
    return ": " + plain_text(error[error.index("error[") :] + remedy)
