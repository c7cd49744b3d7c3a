"""Reading what trainers noted of each batch: the JSON lines in `metrics/` of a job's folder, a file per trainer.

A row: step, slot, loss, samples, at (seconds since 1970), and `metrics` (name -> mean over the batch) where `loss_fn`
returns any. Several rows may be of one step and slot: it was computed again, after a fault or by another trainer. In
sync mode they agree; the newest counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def losses_of(job_dir: Path) -> list[tuple[int, int, float]]:
    """(step, slot, loss) of the job in this folder, each (step, slot) once."""
    return [(step, slot, row["loss"]) for (step, slot), row in sorted(rows_of(job_dir).items())]


def metrics_of(job_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of the loss and of each metric by name, each step once: weighted by samples over the slots."""
    totals: dict[str, dict[int, tuple[float, int]]] = {}
    for (step, _), row in sorted(rows_of(job_dir).items()):
        for name, value in {"loss": row["loss"], **row.get("metrics", {})}.items():
            total, samples = totals.setdefault(name, {}).get(step, (0.0, 0))
            totals[name][step] = total + value * row["samples"], samples + row["samples"]
    return {
        name: [(step, total / samples) for step, (total, samples) in steps.items() if samples]
        for name, steps in totals.items()
    }


def rows_of(job_dir: Path) -> dict[tuple[int, int], Mapping[str, Any]]:
    """The newest row of each (step, slot)."""
    found: dict[tuple[int, int], Mapping[str, Any]] = {}
    for path in sorted((job_dir / "metrics").glob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
                key = row["step"], row["slot"]
            except (ValueError, KeyError, TypeError):  # the last line of a killed trainer, or of a damaged disk
                continue
            before = found.get(key)
            if before is None or before.get("at", 0) <= row.get("at", 0):
                found[key] = row
    return found
