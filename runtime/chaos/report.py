"""The figures of a run under faults: as JSON, and as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from graphft.runtime.chaos.recovery import Recovery

DIFFERENCES_SHOWN = 20
TRAFFIC = ("sent", "received")
"""Counters that tell nothing of the protocol."""


@dataclass
class Report:
    """The figures of one run. `identical` (sync) and `exactly_once` (async) are None when nothing was compared.
    `counters`: what roles counted, and what messages suffered; of a process that was killed, what it last reported."""

    job: str
    seed: int
    members: int
    total_steps: int
    planned: int
    recoveries: list[Recovery] = field(default_factory=list)
    completed: bool = False
    problem: str = ""
    seconds: float = 0.0
    reference_seconds: float | None = None
    steps_repeated: int = 0
    generations: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    identical: bool | None = None
    exactly_once: bool | None = None
    compared: int = 0
    metrics_compared: int = 0
    """Losses and metrics of a batch, each a value."""
    different: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if the job completed and ended with the very bits of the undisturbed run; or, in async mode, after every
        batch had been applied exactly once on every shard."""
        return self.completed and (self.identical is True or self.exactly_once is True)

    @property
    def faults(self) -> dict[str, int]:
        """How many faults of each kind befell the job."""
        return dict(sorted(Counter(r.kind for r in self.recoveries).items()))

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "seed": self.seed,
            "etcd_members": self.members,
            "total_steps": self.total_steps,
            "ok": self.ok,
            "completed": self.completed,
            "identical": self.identical,
            "exactly_once": self.exactly_once,
            "problem": self.problem,
            "tensors_compared": self.compared,
            "metrics_compared": self.metrics_compared,
            "different": self.different,
            "faults": self.faults,
            "faults_planned": self.planned,
            "process_faults": len(self.recoveries),
            "recovery_seconds": summaries(self.recoveries),
            "seconds": round(self.seconds, 1),
            "reference_seconds": self.reference_seconds,
            "steps_repeated": self.steps_repeated,
            "generations": self.generations,
            "counters": dict(sorted(self.counters.items())),
            "log": [
                {
                    "kind": r.kind,
                    "what": r.what,
                    "version": r.version,
                    "generation": r.generation,
                    "alone": r.alone,
                    "seconds": None if r.seconds is None else round(r.seconds, 3),
                }
                for r in self.recoveries
            ],
        }

    def render(self) -> Group:
        """For people: a table of the recoveries, and a line for each other figure."""
        came = f"{len(self.recoveries)} " + f"of {self.planned} " * (len(self.recoveries) < self.planned)
        table = recovery_table(f"{self.job}: {came}faults, seed {self.seed}", self.recoveries)
        return Group(table, *map(Text, self._lines()))

    @property
    def kept(self) -> str:
        """The promise of the job's mode, and whether it was kept."""
        if self.identical is None and self.exactly_once is None:
            return "NOT COMPARED"
        promise = "bit-identical" if self.identical is not None else "exactly once"
        return f"{promise} {'yes' if self.identical or self.exactly_once else 'NO'}"

    def _lines(self) -> list[str]:
        reference = f", undisturbed {self.reference_seconds:.1f} s" if self.reference_seconds is not None else ""
        lines = [
            f"counted        {counted(self.counters)}",
            (
                f"steps          {self.total_steps}, and {self.steps_repeated} done again; "
                f"{self.generations} generations; {self.seconds:.1f} s{reference}"
            ),
        ]
        lines.append(f"completed      {'yes' if self.completed else 'NO: ' + self.problem}")
        if self.identical is not None:
            compared = f"({self.compared} tensors, {self.metrics_compared} metrics)"
            lines.append(f"bit-identical  {'yes' if self.identical else 'NO'} {compared}")
        if self.exactly_once is not None:
            skipped = f"; {n} skipped, and made good" if (n := self.counters["skipped"]) and self.exactly_once else ""
            once = "yes" if self.exactly_once else "NO"
            lines.append(f"exactly once   {once} (every batch, on every shard{skipped})")
        return lines + [f"  {line}" for line in self.different[:DIFFERENCES_SHOWN]]


def counted(counters: Mapping[str, int]) -> str:
    """What the protocol counted, in one line."""
    return ", ".join(f"{n} {k}" for k, n in sorted(counters.items()) if n and not k.startswith(TRAFFIC)) or "nothing"


def recovery_table(title: str, recoveries: Sequence[Recovery]) -> Table:
    """Seconds by kind of fault."""
    table = Table(title=title, title_justify="left")
    for column in ("fault", "times", "median s", "95 % s", "worst s"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for kind, s in summaries(recoveries).items():
        table.add_row(kind, str(s["count"]), *(f"{s[k]:.2f}" for k in ("median", "p95", "worst")))
    return table


def summaries(recoveries: Sequence[Recovery]) -> dict[str, dict[str, Any]]:
    """Seconds from a fault to the next complete step: by kind, and of faults that came during another's recovery."""
    groups: dict[str, list[float]] = {}
    for r in recoveries:
        if r.seconds is not None:
            groups.setdefault(r.kind if r.alone else "during a recovery", []).append(r.seconds)
    everything = [r.seconds for r in recoveries if r.seconds is not None and r.alone]
    ordered: Mapping[str, list[float]] = dict(sorted(groups.items())) | (
        {"all (alone)": everything} if everything else {}
    )
    return {name: _summary(values) for name, values in ordered.items()}


def _summary(values: list[float]) -> dict[str, Any]:
    """`p95`: the smallest value that 95 % of the values do not exceed."""
    ranked = sorted(values)
    middle = len(ranked) // 2
    median = ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2
    p95 = ranked[math.ceil(0.95 * len(ranked)) - 1]
    return {"count": len(ranked), "median": round(median, 3), "p95": round(p95, 3), "worst": round(ranked[-1], 3)}
