"""Tests of threads and processes wait with these."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def until(condition: Callable[[], object], seconds: float = 150.0) -> None:
    """Waits till `condition` holds; fails the test if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def ended(process: psutil.Process | int) -> bool:
    """True if there is no such process, or only what its parent has not collected."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return not found.is_running() or found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_line(process: psutil.Process) -> list[str]:
    """Returns [] for a process that is a zombie, or gone, or not ours to read."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
