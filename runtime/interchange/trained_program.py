"""What a job has trained, as a program that predicts: the forward pass in its folder, with the newest weights."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from graphft.errors import UsageError
from graphft.ir import Program
from graphft.ir.storage import load_program
from graphft.runtime.coordination.job_storage import MODEL, is_url, storage_of
from graphft.runtime.coordination.runs import weights_source
from graphft.runtime.interchange.job_state import job_folder
from graphft.runtime.interchange.weights import read_weights
from graphft.runtime.launcher.result import Result
from graphft.transpiler.config import JobConfig
from graphft.transpiler.prediction import load_prediction, tell_untrained, with_weights
from graphft.transpiler.record import read_record

log = logging.getLogger("graphft")


@dataclass(frozen=True)
class Trained:
    """`program`: to predict with, and its weights. `config`: the job's. `weights`: which they are, in words."""

    program: Program
    config: JobConfig
    weights: str


def read_trained(
    source: str | os.PathLike[str],
    step: int | None = None,
    best: bool = False,
    weights: str | os.PathLike[str] | None = None,
) -> Trained:
    """Reads a job's folder, or the URL of its storage: with the trained model; of a job that is not complete (a warning
    says so), or with a `step`, the weights of a checkpoint; or the `best` model by its validations, of a folder; or
    other `weights` of the same model, whatever `read_weights` reads. The job may be running.

    Raises UsageError for what is no job's, has no program to predict with, or no such weights; GraphftError for what
    is damaged; OSError where the storage fails.
    """
    source = weights_source(source)
    if weights is not None and (best or step is not None):
        raise UsageError("weights are given, and step or best, too", rule="option", help="give one of them")
    if best:
        return _best(source, step)
    with job_folder(source, whole=True) as folder:
        if folder is None:
            raise UsageError(
                f"{source} holds no job", rule="job-directory", help="give the folder or the storage of a job"
            )
        complete = weights is not None or (folder / MODEL).exists()
        url = os.fspath(source).rstrip("/") if is_url(source) else "" if complete else storage_of(folder)
        return _trained(folder, url, step, weights)


def _best(source: str | os.PathLike[str], step: int | None) -> Trained:
    model, folder = best_model(source, step), Path(source)
    config, program = read_record(folder).config, load_prediction(folder)
    tell_untrained(program, load_program(folder / "source"))
    return Trained(with_weights(program, read_weights(model)), config, f"{model}")


def best_model(source: str | os.PathLike[str], step: int | None = None) -> Path:
    """Returns the file of the best model by its validations, of a job's folder. Raises UsageError if there is none, for
    a URL, and for a `step`, which is another choice."""
    if step is not None or is_url(source):
        raise UsageError(
            "the best model is asked for, and " + (f"step {step}, too" if step is not None else "of a URL"),
            rule="option",
            help="give one of them" if step is not None else "give the job's folder: it has the validations",
        )
    folder = Path(weights_source(source))
    result = Result.of(folder, 0, 0.0)
    found = result.best
    missing = result.missing_best()
    if missing and found is None:
        raise UsageError(missing, rule="no-checkpoint", help="predict with the newest model: leave out best")
    if missing:
        log.warning("%s", missing)
    if found is None:
        raise UsageError(
            f"{folder} has no best model",
            rule="no-checkpoint",
            help="transpile(validate=graphft.Validation(data=..., best='loss')) keeps one, from its first on",
        )
    return found.model


def _trained(folder: Path, url: str, step: int | None, weights: str | os.PathLike[str] | None) -> Trained:
    """`url`: of the storage that has the weights; "": the folder has."""
    config, program = read_record(folder).config, load_prediction(folder)
    tell_untrained(program, load_program(folder / "source"))
    if weights is not None:
        return Trained(with_weights(program, read_weights(weights)), config, os.fspath(weights))
    program = with_weights(program, read_weights(url or folder, version=step))
    place = url or str(folder)
    return Trained(program, config, f"{place}, {'the newest' if step is None else f'step {step}'}")
