"""Where a validation's entries are (see `validation.entries`), and their end."""

from __future__ import annotations

import contextlib
import posixpath
import shutil
from pathlib import Path

from graphft.runtime.coordination.job_storage import storage_of
from graphft.runtime.fs import file_system

FOLDER = "entries"


def delete_entries(job_dir: Path, folder: str = FOLDER) -> None:
    """Those of one validation, or of all: a process that is killed when it has concluded one leaves them. As far as
    they can be deleted."""
    shutil.rmtree(job_dir / folder, ignore_errors=True)
    if url := storage_of(job_dir):
        fs, path = file_system(url)
        with contextlib.suppress(OSError):
            fs.delete(posixpath.join(path, folder))
