"""How many failures a call of `train` bears. Preemptions are none, and neither are processes that come and go."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from graphft.errors import GraphftError
from graphft.runtime.driver.running_job import RunningJob
from graphft.runtime.launcher.child import Child
from graphft.runtime.process.role_process import BEGINS

LINES, MOST = 300, 20_000
"""Of the end of a worker's log, in which its traceback is looked for; and characters of that, at most."""


class WorkerFailed(GraphftError):
    """More failures than `max_retries`. `traceback`: the worker's own, of the last one; "" if it wrote none."""

    def __init__(self, message: str, traceback: str, *, help: str) -> None:
        self.traceback = traceback
        super().__init__(message + (f"\n{traceback.rstrip()}" if traceback else ""), rule="retries", help=help)


def traceback_in(lines: Sequence[str], error: str = "") -> str:
    """The last traceback in a log (the last one with the line `error`, if there is one), with those of the errors that
    it came of, and what follows it."""
    begins = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last):")]
    with_error = [i for i, line in enumerate(lines) if error and line.strip() == error]
    if with_error and any(i < with_error[-1] for i in begins):
        lines, begins = lines[: with_error[-1] + 1], [i for i in begins if i < with_error[-1]]
    if not begins:
        return ""
    at = begins.pop()
    while begins and any(line in _CHAINS for line in lines[max(0, at - 3) : at]):
        at = begins.pop()
    return "\n".join(lines[at:])[-MOST:]


def of_life(lines: Sequence[str], pid: int) -> Sequence[str]:
    """What a role's process with this id wrote; of the last process where that one has not said that it begins."""
    begins = [i for i, line in enumerate(lines) if f"] {BEGINS}" in line]
    if not begins:
        return lines
    at = next((i for i in reversed(begins) if re.search(rf"{BEGINS}{pid}\b", lines[i])), begins[-1])
    return lines[at : next((i for i in begins if i > at), None)]


_HELP = "mend what it says, and call train() again, or run the script again: it goes on from the newest checkpoint"
_CHAINS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


class Retries:
    """Of a call: since the one before it, for workers fail between two calls as well. `most` -1: any number."""

    def __init__(self, job: RunningJob) -> None:
        self.job, self.most = job, -1
        self._before: dict[str, int] = {}
        self._preempted_before = 0

    @property
    def count(self) -> int:
        return sum(child.failures - self._before.get(child.name, 0) for child in self.job.children)

    @property
    def preempted(self) -> int:
        return sum(child.preemptions for child in self.job.children) - self._preempted_before

    def settle(self) -> None:
        """The end of a call: the next one bears as many."""
        self._before = {child.name: child.failures for child in self.job.children}
        self._preempted_before += self.preempted

    def check(self) -> None:
        """Raises WorkerFailed when they are too many."""
        if self.most < 0 or self.count <= self.most:
            return
        times = f"workers have failed {self.count} times since the call before, and max_retries is {self.most}"
        raise self.explained(f"{self._death()}; {times}")

    def explained(self, what: str) -> WorkerFailed:
        """The error of a call that failed because of workers, with the traceback of the last one that did."""
        failed = sorted(self._failed(), key=lambda child: (child.alive, -child.started_at))
        found = next(filter(None, map(self._traceback, failed)), "")
        tails = [f"last lines of {c.name}:\n{self.job.tail_of(c)}" for c in failed if not found]
        return WorkerFailed("\n".join([what, *tails]), found, help=_HELP)

    def _death(self) -> str:
        """How the last one that failed has ended. Not of the events: that of this failure may come a moment later."""
        return max(self._failed(), key=lambda child: child.died_at).death

    def _failed(self) -> list[Child]:
        return [c for c in self.job.children if c.failures > self._before.get(c.name, 0)]

    def _traceback(self, child: Child) -> str:
        """Of the process that failed last, not of one before or after it: whole, from its log; or as it was told,
        shortened, from any machine; "" if there is none."""
        began = time.time() - (time.monotonic() - child.died_started)
        events = [e for e in self.job.events() if e.who == child.name and e.at >= began]
        told = [str(e.fields["traceback"]) for e in events if e.fields.get("traceback")]
        error = told[-1].rstrip().splitlines()[-1].strip() if told and told[-1].strip() else ""
        written = of_life(self.job.logs_of(child, LINES), child.died_pid)
        return traceback_in(written, error) or (told[-1] if told else "")
