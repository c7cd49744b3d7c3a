"""A run's table of metrics as the first shard writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from graphft.runtime.process.metric_table import TableWriter


def write_rows(folder: Path, losses: Iterable[float], first: int = 0, samples: int = 4, **metrics: float) -> None:
    """Rows of the steps from `first` on, in the place of those that are there from it on."""
    table = TableWriter(folder, ("loss", *metrics), first)
    for step, loss in enumerate(losses, first):
        table.append(step, samples, (loss, *metrics.values()))
    table.close()
