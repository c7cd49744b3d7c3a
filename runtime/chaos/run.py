"""Runs one job under faults: when each comes, what it does, how long it stopped the job, and when the job hangs."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from graphft.errors import GraphftError
from graphft.runtime.chaos.faults import Fault
from graphft.runtime.chaos.host import Host, send
from graphft.runtime.process.role_process import EXIT_OK, describe_exit, last_lines
from graphft.transpiler.job import Job

LOOK_SECONDS = 0.05
START_SECONDS = 60.0
"""For how long a job that was launched just now does not count as hanging."""
SETTLE_SECONDS = 0.5
"""Roles report about as often: what is known sooner after a fault may be from before it."""
IN_FLIGHT = 2
"""The step that was nearly done when the fault came proves nothing: the one after it does."""
STORY_SECONDS = 2.0
LOG_LINES = 60
NEARLY = 0.98
"""After this share of its steps a job suffers no more: a fault might find it over, and nothing to recover."""
DIFFERENCES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """`patience`: seconds without any progress after which the job counts as hanging."""

    faults: int = 50
    seed: int = 0
    kinds: tuple[str, ...] = ()
    patience: float = 120.0


@dataclass(slots=True)
class Recovery:
    """One fault, and the seconds until later steps were complete; None while they are not.

    `gone`: the ids of processes that it killed. What is seen before `since` proves nothing.
    """

    kind: str
    what: str
    step: int
    at: float
    since: float
    gone: frozenset[str] = frozenset()
    base: int | None = None
    """The lowest step that was seen since, hence where a rollback took the job."""
    seconds: float | None = None

    def look(self, step: int, ids: frozenset[str], total: int, now: float) -> bool:
        """Takes in how far the job is; returns True once it has recovered."""
        if now < self.since or ids & self.gone:
            return False
        self.base = step if self.base is None else min(step, self.base)
        if step >= min(self.base + IN_FLIGHT, total):
            self.seconds = now - self.at
        return self.seconds is not None


@dataclass
class Report:
    """The figures of one run. `promise`: of the job's mode; "" until it is compared with what `different` says."""

    job: str
    seed: int
    total_steps: int
    planned: int
    recoveries: list[Recovery] = field(default_factory=list)
    completed: bool = False
    problem: str = ""
    seconds: float = 0.0
    steps_repeated: int = 0
    generations: int = 0
    promise: str = ""
    compared: int = 0
    different: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if the job completed and ended with the very bits of the undisturbed run; or, in async mode, after every
        batch had been applied exactly once on every shard."""
        return self.completed and bool(self.promise) and not self.different

    @property
    def kept(self) -> str:
        """The promise, and whether it was kept."""
        return f"{self.promise}: {'NO' if self.different else 'yes'}" if self.promise else "NOT COMPARED"

    def render(self) -> Group:
        """Returns a table of the recoveries, and a line for each other figure."""
        title = f"{self.job}: {len(self.recoveries)} of {self.planned} faults, seed {self.seed}"
        again = f"{self.steps_repeated} done again; {self.generations} generations; {self.seconds:.1f} s"
        lines = [
            f"{self.total_steps} steps, and {again}",
            f"completed: {'yes' if self.completed else 'NO: ' + self.problem}",
            f"{self.kept} ({self.compared} tensors compared)" if self.compared else self.kept,
            *(f"  {line}" for line in self.different[:DIFFERENCES_SHOWN]),
        ]
        return Group(recovery_table(title, self.recoveries), *map(Text, lines))


def recovery_table(title: str, recoveries: Sequence[Recovery]) -> Table:
    """Returns seconds by kind of fault."""
    table = Table(title=title, title_justify="left")
    for column in ("fault", "times", "median s", "worst s"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    groups: dict[str, list[float]] = {}
    for r in recoveries:
        if r.seconds is not None:
            groups.setdefault(r.kind, []).append(r.seconds)
    for kind, seconds in sorted(groups.items()):
        table.add_row(kind, str(len(seconds)), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}")
    return table


class Run:
    """One run, from its start to its end. `steps`: how many the job will have, where it stops early."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        options: ChaosOptions,
        schedule: Sequence[Fault] = (),
        say: Callable[[str], object] = lambda line: None,
        steps: int | None = None,
    ) -> None:
        self.job, self.folder, self.options, self.say = job, folder, options, say
        self.steps = job.config.total_steps if steps is None else steps
        self.left = list(schedule)
        self.host = Host(job, folder)
        self.report = Report(job.config.name, options.seed, self.steps, len(schedule))
        self.step = 0
        """The lowest version of the shards when all were last seen."""
        self._fired_at = 0.0
        self._started = time.monotonic()
        self._progress_at = self._started + START_SECONDS

    def play(self) -> Report:
        report = self.report
        try:
            self.host.launch()
            self._follow()
        except GraphftError as error:
            report.problem = str(error)
        finally:
            self.host.close()
        for recovery in self._open:
            recovery.seconds = time.monotonic() - recovery.at
        report.seconds = time.monotonic() - self._started
        return report

    @property
    def _open(self) -> list[Recovery]:
        return [r for r in self.report.recoveries if r.seconds is None]

    def _follow(self) -> None:
        while (status := self.host.step()) is None:
            self.look()
            now = time.monotonic()
            if now - self._progress_at > self.options.patience:
                self._hangs()
                return
            if self.left and self.due(self.left[0], now):
                self._fire(self.left.pop(0))
            time.sleep(LOOK_SECONDS)
        self.report.completed = status == EXIT_OK
        if status != EXIT_OK:
            said = last_lines(self.folder / "logs" / "launcher.log", LOG_LINES)
            self.report.problem = "\n".join([f"the launcher ended: {describe_exit(status)}", *said])

    def look(self) -> None:
        """Takes in how far the job is, where all shards tell it."""
        status, now = self.host.status, time.monotonic()
        if status is None or sum("version" in p for p in status.pservers.values()) < self.job.config.pservers:
            return
        if (status.step, status.generation) != (self.step, self.report.generations):
            self._progress_at = now
        self.report.steps_repeated += max(0, self.step - status.step)
        self.step, self.report.generations = status.step, status.generation
        ids = frozenset(m["id"] for m in (*status.pservers.values(), *status.trainers.values()))
        for recovery in self._open:
            if recovery.look(self.step, ids, self.steps, now):
                self._tell(f"  step {self.step:>5}  {recovery.seconds:6.1f} s after {recovery.kind}")

    def due(self, fault: Fault, now: float) -> bool:
        """Returns whether the next fault is to come now."""
        if self.step >= NEARLY * self.steps:
            return False
        if fault.after is not None and self._fired_at:
            return now >= self._fired_at + fault.after
        return not self._open and self.step >= max(fault.step, 1)

    def _tell(self, line: str) -> None:
        self.say(f"[{time.monotonic() - self._started:7.1f} s] {line}")

    def _hangs(self) -> None:
        self.host.tell_stories()
        time.sleep(STORY_SECONDS)
        self.report.problem = (
            f"no progress for {self.options.patience:.0f} s at step {self.step} of "
            f"generation {self.report.generations}; see {self.folder / 'logs'}"
        )

    # -- faults -------------------------------------------------------------------------------------------------

    def _fire(self, fault: Fault) -> None:
        at, during = time.monotonic(), " (during a recovery)" * bool(self._open)
        done = self._do(fault)
        if done is None:  # there is no process that it could befall: later
            self.left.insert(0, replace(fault, after=None))
            return
        self._fired_at, (what, gone) = at, done
        without_etcd = fault.seconds if fault.kind in ("pause-etcd", "freeze-etcd") else 0.0  # steps may go on a while
        since = time.monotonic() + max(SETTLE_SECONDS, without_etcd)
        self.report.recoveries.append(Recovery(fault.kind, what, self.step, at, since, gone))
        self._tell(f"! step {self.step:>5}  {fault.kind}: {what}{during}")

    def _do(self, fault: Fault) -> tuple[str, frozenset[str]] | None:
        """Carries a fault out. Returns a text, and the ids of those that it killed; None: there is no process for it
        now."""
        verb, _, whom = fault.kind.partition("-")
        if fault.kind == "kill-job":
            self.host.kill_all()
            self._progress_at = time.monotonic() + START_SECONDS
            return "launcher, roles and etcd; launched again", frozenset()
        live = self.host.members(whom.removesuffix("s")) if whom != "etcd" else self.host.etcd()
        if not live:
            return None
        often = [live[0]] if whom == "coordinator" else []  # the one that serves
        chosen = live if whom.endswith("s") else [fault.pick([*often, *live])]
        names = [name for name, _ in chosen]
        if verb == "kill":
            for _, process in chosen:
                send(process, signal.SIGKILL)
            return ", ".join(names), frozenset(names)
        for _, process in chosen:
            self.host.stop_for(process, fault.seconds)
        return f"{', '.join(names)} for {fault.seconds:.1f} s", frozenset()
