"""What a Trainer's validations came to: `validation.jsonl` in the run's folder.

A line: {epoch (how many were done), step, metrics (name -> mean over the data), at (seconds since 1970)}. Of an epoch
that was validated twice the newest line counts.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

from graphft.sealed_json import parse_json

FILE = "validation.jsonl"
log = logging.getLogger("graphft")


def note_validation(job_dir: Path, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
    """`metrics`: as `Validation.run` returns them. Never raises: a full disk must not end a training."""
    values = {name: value for name, value in metrics.items() if name != "samples"}
    row = {"epoch": epoch, "step": step, "metrics": values, "at": round(time.time(), 3)}
    try:
        with (job_dir / FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        log.warning("a validation cannot be noted in %s: %s", job_dir / FILE, error)


def read_validations(job_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics by epoch; without lines that cannot be read."""
    found: dict[int, dict[str, float]] = {}
    try:
        lines = (job_dir / FILE).read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            row = parse_json(line)
            values = {str(name): float(value) for name, value in row["metrics"].items()}
            found[int(row["epoch"])] = {name: value for name, value in values.items() if not math.isnan(value)}
        except (ValueError, KeyError, TypeError, AttributeError):  # the disk did not take it whole
            continue
    return found
