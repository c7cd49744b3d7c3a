"""Finds the line of the user's code that is at work: for an op's `loc`, and for errors of capture."""

from __future__ import annotations

import importlib.util
import os
import traceback
from types import FrameType

TORCH = f"{importlib.util.find_spec('torch').submodule_search_locations[0]}{os.sep}"  # type: ignore[union-attr, index]
TRACED = "traced_by_graphft"
"""Name of the function that tracing runs: what called it is no part of the model."""

_LIBRARIES = (TORCH, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<")


def user_line(frame: FrameType | None, until: str = "") -> str:
    """`model.py:12 in forward`: the innermost frame outside torch and graphft, or nothing.

    Frames from the function named `until` outwards do not count.
    """
    while frame is not None and frame.f_code.co_name != until:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


def error_line(error: BaseException) -> str:
    """The user's line that an error comes from, in the form of `user_line`."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return line_of(frame.f_code.co_filename, line, frame.f_code.co_name)
    return ""


def line_of(file: str, line: int, function: str) -> str:
    """Writes a line of code as text, without its folder, which differs from machine to machine."""
    return f"{os.path.basename(file)}:{line} in {function}"
