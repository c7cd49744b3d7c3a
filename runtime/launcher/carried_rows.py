"""What people are shown of a run goes along when it is gone on with in another folder: one curve, one log."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.callbacks.csv_logger import OWN
from graphft.runtime.callbacks.told import FILE, Told
from graphft.runtime.launcher.result import Result
from graphft.runtime.launcher.tell import tell
from graphft.runtime.process import metric_lines, metric_rows, validations
from graphft.runtime.process.metric_files import FOLDER, LEVELS, files_of

if TYPE_CHECKING:
    from graphft.transpiler import Job


BEST = "best"
"""Folder of the best model."""


def carry_rows(source: Path, before: str, job: Job, new: Path, step: int) -> None:
    """Copies what the run `before` noted in the folder `source` of the steps until this one: metrics, validations, the
    CSV files elsewhere that have its rows, and what callbacks were told. A line tells what cannot be copied: the run
    goes on without it."""
    for name in (validations.FILE, OWN):  # the small ones first: the disk may be full
        with _or_a_line(source / name, new / name):
            shutil.copyfile(source / name, new / name)
    with _or_a_line(source / FILE, new / FILE):
        if (source / FILE).exists():
            told = Told.read(source, before, job.config.plan.total_steps, job.config.passes)
            replace(told, run=job.run_id).write(new)
    validate = job.config.validate
    if validate is not None and validate.best is not None:
        from graphft.runtime.validation.best_model import BestModels

        mode = validate.best.mode or "min"
        with _or_a_line(source / BEST, new / BEST):
            if missing := Result.of(source, 0, 0.0).missing_best():
                raise OSError(missing)
            BestModels(new, mode).adopt(BestModels(source, mode))
    (new / FOLDER).mkdir(exist_ok=True)
    for path in sorted({path for level in LEVELS for path in files_of(source, level)}):
        copy = metric_lines.copy_lines if path.suffix == metric_lines.SUFFIX else metric_rows.copy_rows
        with _or_a_line(path, new / FOLDER / path.name):
            copy(path, new / FOLDER / path.name, step)


@contextlib.contextmanager
def _or_a_line(path: Path, copy: Path) -> Iterator[None]:
    """A copy that failed leaves nothing."""
    try:
        yield
    except FileNotFoundError:
        return
    except (OSError, UsageError) as error:
        tell(f"{path} does NOT go along: {error.message if isinstance(error, UsageError) else error}")
        with contextlib.suppress(OSError):
            copy.unlink()
