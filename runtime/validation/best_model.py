"""The best model so far: `best/step-00000400.safetensors` in the run's folder, and in its storage.

It is written before it is known as the best, whole or not at all; then those before it are deleted. So there is always
the one that `/<job>/decided` names.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from graphft.runtime.checkpoint.store import storage
from graphft.runtime.coordination.job_storage import storage_of
from graphft.runtime.fs import file_system
from graphft.tensor_file import write_tensors

FOLDER = "best"


def best_file(job_dir: Path, step: int) -> Path:
    return job_dir / FOLDER / f"step-{step:08d}.safetensors"


def write_best(job_dir: Path, step: int, state: Mapping[str, Tensor]) -> None:
    """Raises StorageUnavailable."""
    file, url = best_file(job_dir, step), storage_of(job_dir)
    with storage(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(file, state, {"format": "pt", "step": str(step)})
        if url:
            fs, path = file_system(url)
            fs.upload(file, posixpath.join(path, FOLDER, file.name))


def forget_others(job_dir: Path, step: int) -> None:
    """Deletes the models that were the best before, as far as they can be deleted."""
    mine, url = best_file(job_dir, step), storage_of(job_dir)
    with contextlib.suppress(OSError):
        for file in mine.parent.iterdir():
            if file != mine:
                file.unlink()
    if url:
        fs, path = file_system(url)
        with contextlib.suppress(OSError):
            for name in fs.ls_dir(posixpath.join(path, FOLDER)):
                if name != mine.name:
                    fs.rm(posixpath.join(path, FOLDER, name))


def fetch_best(job_dir: Path, step: int) -> Path | None:
    """Where the model of this step is, in the run's folder; None if it is nowhere."""
    file, url = best_file(job_dir, step), storage_of(job_dir)
    if not file.exists() and url:
        fs, path = file_system(url)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            fs.download(posixpath.join(path, FOLDER, file.name), file)
    return file if file.exists() else None
