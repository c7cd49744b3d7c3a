"""Scripts that use graphft, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def run(script: str, *option: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script that uses graphft, and what it says. `option`: that of Python which says what `script` is."""
    return subprocess.run(
        [sys.executable, *filter(None, option or ("-c",)), script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
