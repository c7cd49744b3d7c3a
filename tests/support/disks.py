"""File systems so small that a test can fill them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_file_system(folder: Path, mebibytes: int) -> Iterator[Path]:
    """Mounts an empty one of `mebibytes` at `folder`, which is made; skips the test where nobody may mount."""
    folder.mkdir()
    options = f"size={mebibytes}m"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mount.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
