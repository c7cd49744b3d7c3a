"""What validations came to, a Trainer's and those of a job: `validation.jsonl` in the run's folder.

A line: {epoch (how many were done), step, metrics (name -> value; one that is not finite as text), at (seconds since
1970)}. Of a step that was validated twice the newest line counts.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphft.disk.fileio import read_regular
from graphft.disk.sealed_json import parse_json

FILE = "validation.jsonl"
log = logging.getLogger("graphft")


@dataclass(frozen=True)
class ValidationRow:
    """Of the model after `step` steps, when `epoch` epochs were done. `metrics`: without those that are no number."""

    epoch: int
    step: int
    metrics: Mapping[str, float]


def note_validation(
    job_dir: Path, epoch: int, step: int, metrics: Mapping[str, float], at: float | None = None
) -> None:
    """`metrics`: as `Validation.run` returns them. `at`: now, by default. Never raises: a full disk must not end a
    training."""
    found = {name: value for name, value in metrics.items() if name != "samples"}
    values = {name: value if math.isfinite(value) else str(value) for name, value in found.items()}
    row = {"epoch": epoch, "step": step, "metrics": values, "at": round(time.time() if at is None else at, 3)}
    try:
        with (job_dir / FILE).open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
    except OSError as error:
        log.warning("a validation cannot be noted in %s: %s", job_dir / FILE, error)


def read_validations(job_dir: Path) -> dict[int, ValidationRow]:
    """By step, in order; without lines that cannot be read."""
    found: dict[int, ValidationRow] = {}
    try:
        lines = read_regular(job_dir / FILE).decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            row = parse_json(line)
            values = {str(name): float(value) for name, value in row["metrics"].items()}
            numbers = {name: value for name, value in values.items() if not math.isnan(value)}
            found[int(row["step"])] = ValidationRow(int(row["epoch"]), int(row["step"]), numbers)
        except (ValueError, KeyError, TypeError, AttributeError):  # the disk did not take it whole
            continue
    return dict(sorted(found.items()))
