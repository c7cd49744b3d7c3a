"""Libraries that ready-made callbacks write with: each comes with an extra of the same name."""

from __future__ import annotations

import importlib.util

from graphft.errors import UsageError


def check_library(name: str, callback: str) -> None:
    """Raises UsageError if it is not installed. It is loaded when the callback is first told something."""
    if importlib.util.find_spec(name) is None:
        raise UsageError(
            f"callback {callback} needs the package {name}", rule="callbacks", help=f'pip install "graphft[{name}]"'
        )
