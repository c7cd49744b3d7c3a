"""What an epoch was, as the trainers of this machine noted it: each batch once, whatever was computed again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.runtime.launcher.tell import tell
from graphft.runtime.process.metric_files import rows_of

if TYPE_CHECKING:
    from graphft.plan import Plan


def epoch_metrics(job_dir: Path, plan: Plan, epoch: int) -> dict[str, float]:
    """The loss and each metric that `loss_fn` returned, means over the epoch's samples (the same bits whatever died),
    and how many `samples` these are. A line tells of batches that this machine has no record of."""
    first, end = plan.start_steps[epoch], plan.start_steps[epoch + 1]
    rows = {key: row for key, row in rows_of(job_dir).items() if first <= key[0] < end}
    missing = sum(c.batches for c in plan.chunks_of(epoch)) - len(rows)
    if missing > 0:
        tell(
            f"epoch {epoch + 1}: {missing} batches are not in its metrics: they were left out, or other machines that "
            "do not share the job's folder computed them"
        )
    return mean_of(rows)


def mean_of(rows: Mapping[tuple[int, int], Mapping[str, Any]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    samples = sum(row["samples"] for row in rows.values())
    for _, row in sorted(rows.items()):
        for name, value in {"loss": row["loss"], **row.get("metrics", {})}.items():
            totals[name] = totals.get(name, 0.0) + value * row["samples"]
    return {name: total / samples for name, total in totals.items() if samples} | {"samples": samples}
