"""The rows that trainers noted of each batch, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graphft.runtime.process.means import means_of


class Row(NamedTuple):
    """A batch. `at`: seconds since 1970; `values`: means over its samples by name, `loss` first."""

    step: int
    slot: int
    samples: int
    at: float
    values: dict[str, float]


@dataclass(frozen=True)
class Table:
    """Columns of equal length. `step`, `slot`, `samples`: int64; `at`: float64, seconds since 1970.

    `values`: by name, `loss` first, float64; `known`: by name, whether the row has that value: bool.
    """

    step: np.ndarray
    slot: np.ndarray
    samples: np.ndarray
    at: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)
    known: dict[str, np.ndarray] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    """Files whose rows are lacking, with why, in words."""

    def __len__(self) -> int:
        return len(self.step)

    def rows(self) -> Iterator[Row]:
        columns = [(name, column.tolist(), self.known[name].tolist()) for name, column in self.values.items()]
        heads = zip(self.step.tolist(), self.slot.tolist(), self.samples.tolist(), self.at.tolist(), strict=True)
        for i, head in enumerate(heads):
            yield Row(*head, {name: column[i] for name, column, known in columns if known[i]})

    def take(self, rows: np.ndarray) -> Table:
        """The rows of these indices, or of a mask."""
        columns = (self.step[rows], self.slot[rows], self.samples[rows], self.at[rows])
        values, known = ({name: column[rows] for name, column in of.items()} for of in (self.values, self.known))
        return Table(*columns, values, known)

    def newest(self) -> Table:
        """Of each (step, slot) the row with the newest `at`, of equal ones the last; in order of step and slot."""
        order = np.lexsort((self.at, self.slot, self.step))  # stable
        step, slot = self.step[order], self.slot[order]
        last = np.ones(len(order), bool)
        last[:-1] = (step[1:] != step[:-1]) | (slot[1:] != slot[:-1])
        return self.take(order[last])

    def means(self, name: str, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The groups that have this value, and in each its mean over the samples. `groups`: of each row, in order."""
        rows = self.known[name] & (self.samples > 0)
        groups, samples, values = groups[rows], self.samples[rows], self.values[name][rows]
        if not len(groups):
            return groups, values
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        return groups[starts], means_of(values, samples, starts)


def joined(tables: Sequence[Table]) -> Table:
    """The rows of all, one table's after the other's."""
    names = list(dict.fromkeys(["loss", *(name for table in tables for name in table.values)]))

    def column(of: Iterable[np.ndarray], kind: type) -> np.ndarray:
        return np.concatenate([np.empty(0, kind), *of]).astype(kind, copy=False)

    return Table(
        step=column((t.step for t in tables), np.int64),
        slot=column((t.slot for t in tables), np.int64),
        samples=column((t.samples for t in tables), np.int64),
        at=column((t.at for t in tables), np.float64),
        values={n: column((t.values.get(n, np.full(len(t), np.nan)) for t in tables), np.float64) for n in names},
        known={n: column((t.known.get(n, np.zeros(len(t), bool)) for t in tables), bool) for n in names},
    )
