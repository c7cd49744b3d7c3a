"""A script that makes a job and does nothing with it: a line when it ends, for nothing else would tell."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import FrameType


def made(name: str, by: FrameType) -> None:
    """To be called for each job, by whom it was made. Scripts alone are told: a module, a notebook or a test makes
    jobs for others."""
    if by.f_globals.get("__name__") == "__main__" and "__file__" in by.f_globals:
        used()
        atexit.register(_tell, name, os.getpid())


def used() -> None:
    """To be called where a job is run, saved or predicted with."""
    atexit.unregister(_tell)


def _tell(name: str, pid: int) -> None:
    if os.getpid() != pid or hasattr(sys, "last_type"):  # a forked child; an error has ended the script, and was told
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none: there is nobody to tell
        print(f"job {name} was made and NOT run, nothing was trained: call job.run()", file=sys.stderr, flush=True)
