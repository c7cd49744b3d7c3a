"""Which line of the user's code is at work: for an op's `loc`, and for errors of capture."""

from __future__ import annotations

import os
import traceback
from types import FrameType

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep
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
    """How a line of code is written: without its folder, which differs from machine to machine."""
    return f"{os.path.basename(file)}:{line} in {function}"
