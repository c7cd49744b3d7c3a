"""What befell a job's coordinators, how soon another one served, and whether trainers ended because of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.launcher.process_ends import read_ends

STARTED = 2
"""Coordinators of a job that has any: one serves, one stands by."""
STOOD_BY, NONE_STOOD_BY = "one stood by", "none stood by"


@dataclass
class Coordinators:
    """Follows which one serves. Times are of the monotonic clock."""

    killed: int = 0
    served: int = 0
    """How many of those that were killed served at that moment."""
    stopped: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """From the SIGKILL to the one that serves until another's address is in etcd: where one stood by, and where not."""
    _gone: set[str] = field(default_factory=set)
    _since: tuple[str, float] | None = None
    """Whether one stood by when the one that served was killed, and when that was; None while one serves."""

    def hurt(self, kind: str, ids: Collection[str], view: JobView, now: float, standing_by: bool) -> None:
        """These coordinators of the `view` were killed or stopped by a fault of this kind. `standing_by`: whether
        another one is there, and not stopped."""
        if not kind.startswith("kill-"):
            self.stopped += len(ids)
            return
        self.killed += len(ids)
        self._gone.update(ids)
        if view.coordinator is not None and view.coordinator.id in ids:
            self.served += 1
            self._since = self._since or (STOOD_BY if standing_by else NONE_STOOD_BY, now)

    def look(self, view: JobView, now: float) -> None:
        if self._since is not None and view.coordinator is not None and view.coordinator.id not in self._gone:
            whether, since = self._since
            self.seconds.setdefault(whether, []).append(now - since)
            self._since = None

    def forget(self) -> None:
        """The whole job was killed: what it needs to come back is no take-over."""
        self._since = None


@dataclass
class TrainerEnds:
    """Which ends of trainers a fault accounts for: the others are the job's own doing."""

    _asked: Counter[str] = field(default_factory=Counter)
    _each: int = 0

    def hurt(self, kind: str, ids: Collection[str]) -> None:
        """A fault of this kind befell these trainers, or (a lease ends with it) all of them."""
        if kind in ("kill-trainer", "kill-trainers", "freeze-trainer", "remove-trainer"):
            self._asked.update(f"trainer {name.partition('-')[0]}" for name in ids)
        self._each += kind == "freeze-etcd"

    def unasked(self, folder: Path) -> int:
        """How many trainers of the run in this folder failed, or ended more often than they were made to."""
        ends = read_ends(folder)
        failures = sum(n for name, n in ends.failures.items() if name.startswith("trainer "))
        preempted = {name: n for name, n in ends.preemptions.items() if name.startswith("trainer ")}
        return failures + sum(max(0, n - self._asked[name] - self._each) for name, n in preempted.items())
