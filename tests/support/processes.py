"""Of processes that may end at any moment."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """[] for one that is a zombie, or gone, or not ours to read."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
