"""What a job has trained, as a program that predicts: the forward pass in its folder, with the newest weights."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from graphft.ir import Program
from graphft.runtime.coordination.job_storage import MODEL, fetch, is_url, storage_of
from graphft.runtime.interchange.weights import read_weights
from graphft.storage import load_program
from graphft.transpiler.config import JobConfig
from graphft.transpiler.prediction import load_prediction, tell_untrained, with_weights
from graphft.transpiler.record import read_record


@dataclass(frozen=True)
class Trained:
    """`program`: to predict with, and its weights. `config`: the job's. `weights`: which they are, in words."""

    program: Program
    config: JobConfig
    weights: str


def read_trained(source: str | os.PathLike[str], step: int | None = None) -> Trained:
    """Of a job's folder, or the URL of its storage: with the trained model; of a job that is not complete (a warning
    says so), or with a `step`, the weights of a checkpoint. The job may be running.

    Raises UsageError for what is no job's, has no program to predict with, or no such checkpoint; GraphftError for
    what is damaged; OSError where the storage fails.
    """
    if not is_url(source):
        folder = Path(source)
        whole = (folder / MODEL).exists()
        return _trained(folder, storage_of(folder) if not whole else "", step)
    with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
        url = os.fspath(source).rstrip("/")
        fetch(url, Path(scratch, "job"))
        return _trained(Path(scratch, "job"), url, step)


def _trained(folder: Path, url: str, step: int | None) -> Trained:
    """`url`: of the storage that has the weights; "": the folder has."""
    config, program = read_record(folder).config, load_prediction(folder)
    tell_untrained(program, load_program(folder / "source"))
    program = with_weights(program, read_weights(url or folder, version=step))
    place = url or str(folder)
    return Trained(program, config, f"{place}, {'the newest' if step is None else f'step {step}'}")
