"""What a run's folder tells beside its state: its loss, its best metric, its size, how often processes ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from graphft.disk.fileio import open_regular
from graphft.plan import Plan
from graphft.runtime.coordination.validations import FILE as VALIDATIONS
from graphft.runtime.coordination.validations import read_validations
from graphft.runtime.launcher.folder_sizes import sizes_of
from graphft.runtime.launcher.process_ends import FILE as ENDS
from graphft.runtime.launcher.process_ends import ProcessEnds, read_ends
from graphft.runtime.process.metric_table import Rows, rows_or_why
from graphft.transpiler.criteria import Criterion


@dataclass(frozen=True)
class Best:
    """The best value of a metric. `epoch`: of which pass it is, from 1. `of`: of a Trainer's validations, or of the
    means of the passes that are over (of the first one, while it goes on)."""

    value: float
    epoch: int
    of: Literal["validation", "training"]


@dataclass(frozen=True)
class Figures:
    """`sizes`: bytes by part. `means`: of each metric, loss among them, (pass from 1, mean); `validated`: the same of
    validations. What trainers of other machines computed is in their folders."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    ends: ProcessEnds = field(default_factory=ProcessEnds)
    last_loss: float | None = None
    means: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    validated: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    """Of its metrics and its log, what cannot be read, with why."""

    @property
    def names(self) -> set[str]:
        return {*self.means, *self.validated}

    def best(self, criterion: Criterion) -> Best | None:
        """None where there is no value of that metric."""
        sign = 1 if criterion.mode == "min" else -1
        for of, found in (("validation", self.validated), ("training", self.means)):
            values = [
                (sign * value, epoch) for epoch, value in found.get(criterion.metric, ()) if not math.isnan(value)
            ]
            if values:
                value, epoch = min(values)
                return Best(sign * value, epoch, "validation" if of == "validation" else "training")
        return None


def figures_of(folder: Path, plan: Plan | None) -> Figures:
    """`plan`: None of a folder whose job cannot be read."""
    sizes, ends = sizes_of(folder), read_ends(folder)
    if plan is None:
        return Figures(sizes, ends)
    (rows, why), validated = rows_or_why(folder), dict[str, list[tuple[int, float]]]()
    for row in read_validations(folder).values():
        number = row.epoch + (row.step not in plan.start_steps)  # within an epoch: of that one
        for name, value in row.metrics.items():
            validated.setdefault(name, []).append((number, value))
    lacking = (*([why] if why else []), *_unread(folder))
    _, known = rows.known()
    last = float(known.values("loss")[-1]) if len(known) else None
    return Figures(sizes, ends, last, _epoch_means(rows, plan), validated, lacking)


def _unread(folder: Path) -> Iterator[str]:
    for path in (folder / VALIDATIONS, folder / ENDS):
        try:
            open_regular(path).close()
        except FileNotFoundError:
            continue
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror or error}"


def _epoch_means(rows: Rows, plan: Plan) -> dict[str, list[tuple[int, float]]]:
    """Of the epochs that are over; of the one that goes on, if it is the first."""
    samples, means = rows.means(plan.start_steps)
    begun = np.flatnonzero(samples)
    over = begun[: max(1, plan.pass_of(rows.first + len(rows)))]
    return {name: list(zip((over + 1).tolist(), of[over].tolist(), strict=True)) for name, of in means.items()}
