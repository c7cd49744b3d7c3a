"""Reading what trainers noted of each batch: the rows in `metrics/` of a job's folder, files of each trainer.

A row: step, slot, loss, samples, at (seconds since 1970), and `metrics` (name -> mean over the batch) where `loss_fn`
returns any. Several rows may be of one step and slot: it was computed again, after a fault or by another trainer. In
sync mode they agree; the newest counts.
"""

from __future__ import annotations

from pathlib import Path

from graphft.runtime.process.metric_table import read_table


def losses_of(job_dir: Path) -> list[tuple[int, int, float]]:
    """(step, slot, loss) of the job in this folder, each (step, slot) once."""
    table = read_table(job_dir)
    return list(zip(table.step.tolist(), table.slot.tolist(), table.values["loss"].tolist(), strict=True))


def metrics_of(job_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of the loss and of each metric by name, each step once: weighted by samples over the slots."""
    table = read_table(job_dir)
    means = {name: table.means(name, table.step) for name in table.values}
    return {n: list(zip(steps.tolist(), of.tolist(), strict=True)) for n, (steps, of) in means.items() if len(steps)}
