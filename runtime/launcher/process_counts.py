"""How many processes are started here: what can never do is an error, and what is missing is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from graphft.errors import UsageError
from graphft.runtime.coordination.status import JobStatus

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig

FIRST_SECONDS, AGAIN_SECONDS = 5.0, 30.0
"""From when on what is missing is told, and how often."""


class Counts(NamedTuple):
    """How many processes of each role a launcher starts."""

    trainers: int
    pservers: int
    coordinators: int = 0

    def processes(self) -> Iterator[tuple[str, int]]:
        """(role, index) of each, in the order in which they are started."""
        for role, count in (("coordinator", self.coordinators), ("pserver", self.pservers), ("trainer", self.trainers)):
            yield from ((role, index) for index in range(count))


def check_counts(config: JobConfig, counts: Counts, embedded: bool) -> None:
    """Raises UsageError for numbers of processes here with which the job can never complete.

    `embedded`: this launcher starts the etcd. It ends with the launcher, which no other launcher can join.
    """
    trainers, pservers, coordinators = counts
    if pservers > config.pservers:
        raise _bad("pservers", pservers, f"but the job has {config.pservers}", f"start {config.pservers} or fewer")
    if coordinators and config.dispatch != "coordinator":
        why = "but the job's trainers claim their chunks in etcd: it has no coordinator"
        raise _bad("coordinators", coordinators, why, 'leave it out, or transpile(dispatch="coordinator")')
    if not config.ft and config.sync and trainers not in (0, config.trainers):
        raise UsageError(
            f"{trainers} trainers cannot run a job of {config.trainers} without fault "
            "tolerance: each computes its own part of every step",
            rule="option",
            help=f"start {config.trainers}, or use ft=True, where any number will do",
        )
    if not embedded:
        return
    elsewhere = "or give --etcd HOST:PORT of one that runs, which launchers on other machines can join"
    if trainers == 0:
        raise _bad("trainers", 0, "and this launcher brings its own etcd: nothing would train", f"start 1, {elsewhere}")
    if pservers < config.pservers:
        raise _bad(
            "pservers",
            pservers,
            f"but the job has {config.pservers}, and this launcher brings its own etcd: it would wait for ever",
            f"leave it out, {elsewhere}",
        )
    if coordinators == 0 and config.dispatch == "coordinator":
        why = "and this launcher brings its own etcd: nothing would give out the job's tasks"
        raise _bad("coordinators", 0, why, f"leave it out, {elsewhere}")


def _bad(name: str, value: int, why: str, help: str) -> UsageError:
    return UsageError(f"{name} is {value}, {why}", rule="option", help=help)


class MissingProcesses:
    """Tells, again and again, for which processes a job waits that this launcher does not start."""

    def __init__(
        self,
        job_dir: Path,
        endpoints: str,
        own: Counts,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job_dir, self._endpoints = job_dir, endpoints
        self._own, self._say, self._clock = own, say, clock
        self._next = clock() + FIRST_SECONDS

    def look(self, status: JobStatus) -> None:
        missing = list(self._missing(status)) if status.state == "running" else []
        if not missing:
            self._next = max(self._next, self._clock() + FIRST_SECONDS)
        elif self._clock() >= self._next:
            self._next = self._clock() + AGAIN_SECONDS
            start = f"graphft start ROLE --job {self._job_dir} --etcd {self._endpoints}"
            self._say(f"waiting for {' and '.join(missing)}, which this launcher does not start (elsewhere: {start})")

    def _missing(self, status: JobStatus) -> Iterator[str]:
        absent = sorted(set(range(self._own.pservers, status.spec["pservers"])) - status.pservers.keys())
        if absent:
            yield f"pserver{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        if self._own.coordinators == 0 and status.has_coordinator and not status.coordinators:
            yield "a coordinator"
        if self._own.trainers == 0 and not status.trainers and not status.loading:
            yield "a trainer"
