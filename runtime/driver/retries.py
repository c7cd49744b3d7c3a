"""How many failures a call of `train` bears. Preemptions are none, and neither are processes that come and go."""

from __future__ import annotations

from graphft.errors import GraphftError
from graphft.runtime.driver.running_job import RunningJob


class WorkerFailed(GraphftError):
    """More failures than `max_retries`. `traceback`: the worker's own, of the last one; "" if it wrote none."""

    def __init__(self, message: str, traceback: str, *, help: str) -> None:
        self.traceback = traceback
        super().__init__(message + (f"\n{traceback.rstrip()}" if traceback else ""), rule="retries", help=help)


class Retries:
    """`most` -1: any number."""

    def __init__(self, job: RunningJob, most: int) -> None:
        self.job, self.most = job, most
        self._before = self._failures()

    def _failures(self) -> dict[str, int]:
        return {child.name: child.failures for child in self.job.children}

    @property
    def count(self) -> int:
        return sum(n - self._before.get(name, 0) for name, n in self._failures().items())

    def check(self) -> None:
        """Raises WorkerFailed when they are too many."""
        if self.most < 0 or self.count <= self.most:
            return
        failed = [c for c in self.job.children if c.failures > self._before.get(c.name, 0)]
        last = max(failed, key=lambda child: child.started_at)
        raise WorkerFailed(
            f"{last.name} failed, and workers have failed {self.count} times in this call: max_retries is {self.most}",
            self._traceback() or self.job.tail_of(last),
            help="mend what it says, and call train() again: it goes on from the newest checkpoint",
        )

    def _traceback(self) -> str:
        """Of the last step that failed, as its worker told it."""
        events = self.job.status.events if self.job.status is not None else []
        found = [str(e.fields["traceback"]) for e in events if e.fields.get("traceback")]
        return found[-1] if found else ""
