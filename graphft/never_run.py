"""A script that makes a job and does nothing with it: a line when it ends, for nothing else would tell."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import FrameType

_unused: dict[str, str] = {}
"""Names of jobs that were made and not used so far, by run."""


def made(run_id: str, name: str, by: FrameType) -> None:
    """To be called for each job, by whom it was made. Scripts alone are told: a module, a notebook or a test makes
    jobs for others."""
    if by.f_globals.get("__name__") == "__main__" and "__file__" in by.f_globals:
        if not _unused:
            atexit.unregister(_tell)
            atexit.register(_tell, os.getpid())
        _unused[run_id] = name


def used(run_id: str) -> None:
    """To be called where a job is run, saved or predicted with."""
    _unused.pop(run_id, None)


def forget() -> None:
    """No job is told of any more: who calls tells more than this line would."""
    _unused.clear()


def _tell(pid: int) -> None:
    if os.getpid() != pid or hasattr(sys, "last_type"):  # a forked child; an error has ended the script, and was told
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none: there is nobody to tell
        for name in _unused.values():
            print(f"job {name} was made and NOT run by this process: job.run() trains it", file=sys.stderr, flush=True)
