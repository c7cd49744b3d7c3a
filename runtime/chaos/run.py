"""Running one job under faults: when each comes, what it does, and when the job is taken for hanging."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from graphft.errors import GraphftError
from graphft.runtime.chaos.fault_schedule import Fault
from graphft.runtime.chaos.host import COORDINATORS, Host, send
from graphft.runtime.chaos.probe import ASK_SECONDS
from graphft.runtime.chaos.recovery import Recoveries
from graphft.runtime.chaos.report import Report
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd, EtcdError
from graphft.runtime.process.role_process import EXIT_OK, describe_exit
from graphft.transpiler import Job

START_SECONDS = 60.0
"""For how long a job that was launched just now does not count as hanging."""
COUNT_SECONDS = 0.5
STORY_SECONDS = 2.0
LOG_LINES = 60
REPLACE_SECONDS = 5.0
"""For how long, at most, a fault waits until the processes that died are replaced."""
NEARLY = 0.98
"""After this share of its steps a job suffers no more: a fault might find it over, and nothing to recover."""
LATE_SHARE = 0.02
"""A fault that is late by this share of the steps waits for nothing but that the job goes on: else a fast one is over
before it has suffered what it was to suffer."""
SPARE_TRAINERS = 2
"""So many trainers more than slots are added at most."""
OFTEN = 2
"""How often more than others the coordinator that serves is drawn."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """`patience`: seconds without any progress after which the job is taken for hanging."""

    faults: int = 50
    seed: int = 0
    kinds: tuple[str, ...] = ()
    members: int = 1
    patience: float = 120.0


class Run:
    """One run, from its start to its end."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        options: ChaosOptions,
        schedule: Sequence[Fault],
        say: Say,
        steps: int | None = None,
    ) -> None:
        """`steps`: how many the job will have, where it stops early."""
        self.job, self.folder, self.options, self.say = job, folder, options, say
        self.steps = job.config.total_steps if steps is None else steps
        self.keys = Keys(job.config.name)
        self.left = list(schedule)
        self.host = Host(job, folder, options.members)
        self.recoveries = Recoveries(job.config.pservers, self.steps)
        self.report = Report(
            job.config.name, options.seed, options.members, self.steps, len(schedule), self.recoveries.all
        )
        self._counters: dict[tuple[str, int], dict[str, int]] = {}
        self._count_at = 0.0
        self._fired_at = 0.0
        self._trainers = job.config.trainers
        self._started = time.monotonic()

    def play(self) -> Report:
        try:
            self.recoveries.progress_at = self._started + START_SECONDS
            self.host.start()
            self._follow()
        except GraphftError as error:
            self.report.problem = str(error)
        finally:
            self.host.close()
        self.recoveries.finish(time.monotonic())
        report = self.report
        report.seconds = time.monotonic() - self._started
        report.steps_repeated, report.generations = self.recoveries.repeated, self.recoveries.generations
        for counters in self._counters.values():
            report.counters.update(counters)
        return report

    # -- the loop -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while True:
            status = self.host.step()
            if status is not None:
                self._ended(status)
                return
            self._look()
            now = time.monotonic()
            if now - self.recoveries.progress_at > self.options.patience:
                self._hangs()
                return
            if self.left and self._due(self.left[0], now):
                self._fire(self.left.pop(0))

    def _look(self) -> None:
        probe = self.host.probe
        assert probe is not None
        assert self.host.etcd is not None
        probe.look(ASK_SECONDS)
        now = time.monotonic()
        for recovery in self.recoveries.update(probe.answers, probe.view, now):
            self._tell(f"  step {self.recoveries.low:>5}  {recovery.seconds:6.2f} s after {recovery.kind}")
        if now >= self._count_at:
            self._count_at = now + COUNT_SECONDS
            self._count(self.host.etcd)

    def _due(self, fault: Fault, now: float) -> bool:
        if self.recoveries.low >= NEARLY * self.steps:
            return False
        if fault.after is not None and self._fired_at:
            return now >= self._fired_at + fault.after
        if self.recoveries.open or self.recoveries.low < max(fault.step, 1):
            return False
        if self.recoveries.low >= fault.step + LATE_SHARE * self.steps:
            return True
        return self.host.whole and (self._all_there() or now >= self._fired_at + REPLACE_SECONDS)

    def _all_there(self) -> bool:
        """Whether all processes that died are back: each fault finds the job as strong as the one before."""
        trainers, pservers = len(self.host.trainers()), len(self.host.pservers())
        return trainers >= self._trainers and pservers >= self.job.config.pservers and self._coordinated()

    def _coordinated(self) -> bool:
        """Whether one coordinator serves, and the others stand by."""
        if not self.host.has_coordinator:
            return True
        assert self.host.probe is not None
        live, serving = self.host.coordinators(), self.host.probe.view.coordinator
        return len(live) >= COORDINATORS and serving is not None and serving.id == live[0][0].id

    def _count(self, etcd: Etcd) -> None:
        """What roles report of themselves; the lease tells the processes of one role apart."""
        try:
            kvs = etcd.range(self.keys.status, deadline=0.2).kvs
        except EtcdError:
            return
        for kv in kvs:
            self._counters[kv.key, kv.lease] = json.loads(kv.value).get("counters", {})

    def _tell(self, line: str) -> None:
        self.say(f"[{time.monotonic() - self._started:7.1f} s] {line}")

    # -- the end ------------------------------------------------------------------------------------------------

    def _ended(self, status: int) -> None:
        self.report.completed = status == EXIT_OK
        if status != EXIT_OK:
            self.report.problem = f"the launcher ended: {describe_exit(status)}\n{self._logs(('launcher.log',))}"

    def _hangs(self) -> None:
        self.host.tell_stories()
        time.sleep(STORY_SECONDS)
        self.report.problem = (
            f"no progress for {self.options.patience:.0f} s at step {self.recoveries.low} of "
            f"generation {self.recoveries.generation}\n{self._logs()}"
        )

    def _logs(self, names: Sequence[str] = ()) -> str:
        """The last lines of the roles' logs."""
        parts = []
        for path in sorted((self.folder / "logs").glob("*.log")):
            if not names or path.name in names:
                lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
                parts += [f"--- {path}", *("  " + line for line in lines)]
        return "\n".join(parts)

    # -- faults -------------------------------------------------------------------------------------------------

    def _fire(self, fault: Fault) -> None:
        alone, at = not self.recoveries.open and self.host.whole and self._all_there(), time.monotonic()
        done = self._do(fault)
        if done is None:  # no process is there that it could befall: later
            self.left.insert(0, replace(fault, after=None))
            return
        self._fired_at, (kind, what, gone) = at, done
        self._trainers += {"add-trainer": 1, "remove-trainer": -1}.get(kind, 0)
        recovery = self.recoveries.begin(kind, what, at, alone, gone)
        if kind in ("pause-etcd", "freeze-etcd"):  # steps may go on without it, for a while
            recovery.since = at + fault.seconds
        self._tell(f"! step {recovery.version:>5}  {kind}: {what}{'' if recovery.alone else ' (during a recovery)'}")

    def _do(self, fault: Fault) -> tuple[str, str, frozenset[str]] | None:
        """Carries a fault out. Returns what was done: kind and text, and which shards' processes it killed. None:
        there is no process for it now."""
        verb, _, whom = fault.kind.partition("-")
        if fault.kind == "kill-job":
            self.host.kill_all()
            self.host.resume_all()
            self._trainers = self.job.config.trainers
            self.recoveries.progress_at = time.monotonic() + START_SECONDS
            return fault.kind, "launcher, roles and etcd; launched again", frozenset()
        if whom in ("etcd", "leader"):
            what = self._hurt_etcd(fault, verb, whom)
            return (fault.kind, what, frozenset()) if what else None
        if verb in ("add", "remove"):
            return self._resize(fault, verb)
        return self._hurt_role(fault, verb, whom)

    def _hurt_etcd(self, fault: Fault, verb: str, whom: str) -> str:
        """What was done; "" when etcd does not run at the moment."""
        if verb == "kill" and self.host.cluster is not None:
            return self.host.kill_member(fault, whom == "leader")
        processes = self.host.etcd_processes()
        if not processes:
            return ""
        chosen = processes if verb == "freeze" else [fault.pick(processes)]
        for process in chosen:
            self._hurt(process, verb, fault.seconds)
        return f"{len(chosen)} of {len(processes)} servers{_lasting(verb, fault.seconds)}"

    def _resize(self, fault: Fault, verb: str) -> tuple[str, str, frozenset[str]]:
        """Adds or removes a trainer; the other of the two when there are too many, or only one."""
        live = self.host.trainers()
        if verb == "add" and len(live) >= self.job.config.trainers + SPARE_TRAINERS:
            verb = "remove"
        if verb == "remove" and len(live) > 1:
            record, process = fault.pick(live)
            return "remove-trainer", self.host.remove_trainer(record, process), frozenset()
        return "add-trainer", self.host.add_trainer(), frozenset()

    def _hurt_role(self, fault: Fault, verb: str, whom: str) -> tuple[str, str, frozenset[str]] | None:
        live = getattr(self.host, whom.removesuffix("s") + "s")()
        if not live:
            return None
        often = [live[0]] * OFTEN if whom == "coordinator" else []
        chosen = live if whom.endswith("s") else [fault.pick([*often, *live])]
        ids = [record.id for record, _ in chosen]
        for _, process in chosen:
            self._hurt(process, verb, fault.seconds)
        gone = frozenset(ids) if verb == "kill" else frozenset()
        return fault.kind, ", ".join(ids) + _lasting(verb, fault.seconds), gone

    def _hurt(self, process: psutil.Process, verb: str, seconds: float) -> None:
        if verb == "kill":
            send(process, signal.SIGKILL)
            return
        self.host.stop_for(process, seconds)


def _lasting(verb: str, seconds: float) -> str:
    return "" if verb == "kill" else f" for {seconds:.1f} s"
