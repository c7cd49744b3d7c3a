"""Reading what trainers noted of each batch: the JSON lines in `metrics/` of a job's folder, a file per trainer.

A row: step, slot, loss, samples, at (seconds since 1970), and `metrics` (name -> mean over the batch) where `loss_fn`
returns any. Several rows may be of one step and slot: it was computed again, after a fault or by another trainer. In
sync mode they agree; the newest counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def losses_of(job_dir: Path) -> list[tuple[int, int, float]]:
    """(step, slot, loss) of the job in this folder, each (step, slot) once."""
    return [(step, slot, row["loss"]) for (step, slot), row in sorted(rows_of(job_dir).items())]


def metrics_of(job_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of the loss and of each metric by name, each step once: weighted by samples over the slots."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, rows in groupby(sorted(rows_of(job_dir).items()), lambda item: item[0][0]):
        for name, value in means_of(row for _, row in rows).items():
            found.setdefault(name, []).append((step, value))
    return found


def means_of(rows: Iterable[Row]) -> dict[str, float]:
    """The loss and each metric by name, weighted by samples, added up in the order of the rows; of none: nothing."""
    totals: dict[str, tuple[float, int]] = {}
    for row in rows:
        for name, value in values_of(row).items():
            total, samples = totals.get(name, (0.0, 0))
            totals[name] = total + value * row["samples"], samples + row["samples"]
    return {name: total / samples for name, (total, samples) in totals.items() if samples}


def values_of(row: Row) -> dict[str, float]:
    """The loss, and what `loss_fn` returned beside it."""
    return {"loss": row["loss"], **row.get("metrics", {})}


def rows_of(job_dir: Path) -> dict[tuple[int, int], Row]:
    """The newest row of each (step, slot)."""
    found: dict[tuple[int, int], Row] = {}
    for path in sorted((job_dir / "metrics").glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            row = row_of(line)
            if row is not None:
                key = row["step"], row["slot"]
                found[key] = newer(found.get(key), row)
    return found


def row_of(line: bytes) -> Row | None:
    """None for what is no row: the last line of a killed trainer, or of a damaged disk."""
    try:
        row = json.loads(line)
        return row if {"step", "slot", "loss", "samples"} <= row.keys() else None
    except (ValueError, AttributeError):
        return None


def newer(before: Row | None, row: Row) -> Row:
    """Which of two rows of a step and slot counts."""
    return row if before is None or before.get("at", 0) <= row.get("at", 0) else before
