"""A script that makes a job and does nothing with it: a line when it ends, for nothing else would tell."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import FrameType

_unused: dict[str, str] = {}
"""Jobs that were made and not used so far, by run: their names, and where they were made."""


def made(run_id: str, name: str, by: FrameType) -> None:
    """To be called for each job, by whom it was made. Scripts are told, of what their modules make as well: a notebook
    or a test, a role that imports a script, and graphft itself make jobs for others."""
    if _is_of_script(by):
        if not _unused:
            atexit.unregister(_tell)
            atexit.register(_tell, os.getpid())
        _unused[run_id] = f"{name} (made at {os.path.basename(by.f_code.co_filename)}:{by.f_lineno})"


def _is_of_script(by: FrameType) -> bool:
    """`python train.py`, and any function that it calls; of `python -m package` its main module alone, as much is run
    by `-m`. What a module makes while it is imported is for its own run: it may be imported for something else in it,
    as a script is once more for its Dataset."""
    main = getattr(sys.modules.get("__main__"), "__dict__", {})
    if main.get("__file__") is None or main.get("__name__") != "__main__":  # "__mp_main__": a child
        return False
    module = _name(by)
    others = main.get("__spec__") is None and "pytest" not in sys.modules
    return (module == "__main__" or (others and not module.startswith("graphft."))) and _imports(by) == "__main__"


def _imports(frame: FrameType | None) -> str:
    """The module whose top level, which runs, has called this; of a thread the script."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return _name(frame) if frame is not None else "__main__"


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


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
        for job in _unused.values():
            print(f"job {job} was NOT run by this process: job.run() trains it", file=sys.stderr, flush=True)
