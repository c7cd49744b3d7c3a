"""A job's processes and its etcd, from outside: started with the launcher, and hurt with signals."""

from __future__ import annotations

import contextlib
import heapq
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from graphft.errors import GraphftError, plain_text
from graphft.runtime.chaos.fault_schedule import Fault
from graphft.runtime.chaos.probe import Probe
from graphft.runtime.coordination.connect import connect_from, write_endpoints
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.engines.base import Run
from graphft.runtime.engines.local import Local
from graphft.runtime.etcd import EmbeddedCluster, EmbeddedEtcd, Etcd, EtcdError
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.process.role_process import role_environment, spawn
from graphft.transpiler import Job

START_SECONDS = 120.0
STOP_SECONDS = 20.0
DEATH_SECONDS = 30.0
COORDINATORS = 2
"""Of a job that has any: one serves, one stands by."""


class Host:
    """One job on this machine. `members` of etcd: 1, the launcher's own; more, a cluster beside the launcher."""

    def __init__(self, job: Job, folder: Path, members: int) -> None:
        self.job, self.folder = job, folder.resolve()
        self.has_coordinator = job.config.dispatch == "coordinator"
        self.cluster = EmbeddedCluster(self.folder / "etcd-cluster", members) if members > 1 else None
        self.launcher: subprocess.Popen[bytes] | None = None
        self.etcd: Etcd | None = None
        self.probe: Probe | None = None
        self._added: Supervisor | None = None
        self._next_index = job.config.trainers
        self._removed: set[str] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._stopped: dict[int, float] = {}

    # -- running ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.cluster is not None:
            self.cluster.start()
        self.launch()

    def launch(self) -> None:
        """Starts the launcher, and waits until its etcd answers. Raises GraphftError if it does not."""
        command = ["launch", "--quiet", "--job", str(self.folder)]
        if self.cluster is not None:
            command += ["--etcd", ",".join(self.cluster.endpoints)]
        if self.has_coordinator:
            command += ["--coordinators", str(COORDINATORS)]
        write_endpoints(self.folder, "")
        self.launcher = spawn(command, self.folder / "logs" / "launcher.log", {})
        self.etcd = self._connect()
        self.probe = Probe(self.job, self.etcd)
        environment = {**role_environment(), "OMP_NUM_THREADS": str(self.job.config.threads)}
        self._added = Supervisor(
            self.folder,
            Keys(self.job.config.name),
            self.etcd,
            ",".join(self.etcd.endpoints),
            Local(fork_server=False).open(Run(self.folder, str(self.folder), environment)),
        )

    def _connect(self) -> Etcd:
        assert self.launcher is not None
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                return connect_from(self.folder, wait=0.5)
            except GraphftError as error:
                if self.launcher.poll() is not None:
                    said = (self.folder / "logs" / "launcher.log").read_text(errors="replace").strip()
                    raise GraphftError(
                        f"its launcher ended at once: {plain_text(said)}",
                        rule="job-failed",
                        help="see what the launcher says",
                    ) from error
                if time.monotonic() > end:
                    raise

    def step(self) -> int | None:
        """Does what is due. Returns the launcher's exit status once it has ended."""
        assert self.launcher is not None
        assert self._added is not None
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        self._added.step(0)
        return self.launcher.poll()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, id(action), action))

    def stop_for(self, process: psutil.Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT when the longest stop that it was given is over."""
        until = self._stopped[process.pid] = max(time.monotonic() + seconds, self._stopped.get(process.pid, 0.0))
        send(process, signal.SIGSTOP)
        self.later(until - time.monotonic(), lambda: self._continue(process))

    def _continue(self, process: psutil.Process) -> None:
        if time.monotonic() >= self._stopped.get(process.pid, 0.0):
            self._stopped.pop(process.pid, None)
            send(process, signal.SIGCONT)

    @property
    def whole(self) -> bool:
        """Whether nothing is stopped or away that is to come back."""
        return not self._timers

    def close(self) -> None:
        """Ends everything that still runs."""
        self._disconnect(lambda added: added.close())
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.terminate()
            try:
                self.launcher.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()
        if self.cluster is not None:
            self.cluster.stop()

    def _disconnect(self, end: Callable[[Supervisor], None]) -> None:
        if self._added is not None:
            end(self._added)
        for part in (self.probe, self.etcd):
            if part is not None:
                part.close()
        self._added = self.probe = self.etcd = None

    # -- who is there -------------------------------------------------------------------------------------------

    def pservers(self) -> list[tuple[Registration, psutil.Process]]:
        """Registered pservers of this machine that are alive, by index."""
        assert self.probe is not None
        return self._alive([record for _, record in sorted(self.probe.view.pservers.items())])

    def trainers(self) -> list[tuple[Registration, psutil.Process]]:
        """Registered trainers of this machine that are alive, and were not asked to go, by id."""
        assert self.probe is not None
        records = sorted(self.probe.view.trainers.values(), key=lambda r: r.id)
        return self._alive([r for r in records if r.id not in self._removed])

    def coordinators(self) -> list[tuple[Registration, psutil.Process]]:
        """Registered coordinators of this machine that are alive, the one that serves first."""
        assert self.probe is not None
        view = self.probe.view
        serving = view.coordinator.id if view.coordinator is not None else ""
        return self._alive(sorted(view.coordinators.values(), key=lambda r: (r.id != serving, r.id)))

    def _alive(self, records: list[Registration]) -> list[tuple[Registration, psutil.Process]]:
        found = [(r, self._process(r.pid)) for r in records if r.process.visible]
        return [(r, p) for r, p in found if p is not None]

    def _process(self, pid: int) -> psutil.Process | None:
        """The job's process of this id; None if there is none (any more)."""
        try:
            process = psutil.Process(pid)
            return process if any(str(self.folder) in part for part in process.cmdline()) else None
        except psutil.Error:
            return None

    # -- etcd ---------------------------------------------------------------------------------------------------

    def etcd_processes(self) -> list[psutil.Process]:
        """The launcher's etcd, or the members of the cluster that run."""
        if self.cluster is not None:
            found = [self._process(m.pid) for m in self.cluster.members if m.running]
        else:
            assert self.launcher is not None
            found = [p for p in psutil.Process(self.launcher.pid).children() if _is_etcd(p)]
        return [p for p in found if p is not None]

    def kill_member(self, fault: Fault, leader: bool) -> str:
        """SIGKILL to a member of the cluster, which comes back with its data after the fault's seconds. "" if none
        runs."""
        assert self.cluster is not None
        running = [m for m in self.cluster.members if m.running]
        if not running:
            return ""
        member = fault.pick(running)
        if leader:
            try:
                member = self.cluster.leader()
            except EtcdError:
                leader = False
        member.kill()
        self.later(fault.seconds, lambda: _restart(member))
        number, what = self.cluster.members.index(member), " (leader)" if leader else ""
        return f"etcd member {number}{what}, away for {fault.seconds:.1f} s"

    # -- trainers come and go -----------------------------------------------------------------------------------

    def add_trainer(self) -> str:
        """One more trainer, which is started again when it dies."""
        assert self._added is not None
        index, self._next_index = self._next_index, self._next_index + 1
        self._added.add("trainer", index)
        return f"trainer {index}"

    def remove_trainer(self, record: Registration, process: psutil.Process) -> str:
        """SIGTERM: it hands its slots over and ends."""
        self._removed.add(record.id)
        send(process, signal.SIGTERM)
        return f"trainer {record.id}"

    # -- all of it ----------------------------------------------------------------------------------------------

    def kill_all(self) -> None:
        """SIGKILL to the launcher, with which its roles and its etcd die, to added trainers, and to the cluster."""
        assert self.launcher is not None
        roles = psutil.Process(self.launcher.pid).children(recursive=True)
        self.launcher.kill()
        self.launcher.wait()
        self._disconnect(_kill)
        if self.cluster is not None:
            for member in self.cluster.members:
                member.kill()
        self._timers.clear()
        self._stopped.clear()
        _, left = psutil.wait_procs(roles, timeout=DEATH_SECONDS)
        if left:
            raise GraphftError(
                f"{len(left)} processes outlived the launcher: {left}",
                rule="chaos",
                help="roles and etcd are to die with the process that started them",
            )

    def resume_all(self) -> None:
        """Launches the job again, in the folder that it left."""
        if self.cluster is not None:
            for member in self.cluster.members:
                member.launch()
            for member in self.cluster.members:
                member.await_healthy()
        self.launch()

    def tell_stories(self) -> None:
        """Has every role write its story, and where its threads are, into its log."""
        for _, process in [*self.coordinators(), *self.pservers(), *self.trainers()]:
            send(process, signal.SIGCONT)
            send(process, signal.SIGUSR1)


def send(process: psutil.Process, signum: int) -> None:
    """Sends a signal, if the process (and not another of its id) still runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _is_etcd(process: psutil.Process) -> bool:
    try:
        return any(part.startswith("--data-dir=") for part in process.cmdline())
    except psutil.Error:
        return False


def _restart(member: EmbeddedEtcd) -> None:
    if not member.running:
        member.launch()


def _kill(added: Supervisor) -> None:
    for child in added.children.values():
        if child.process is not None and child.process.poll() is None:
            child.process.send_signal(signal.SIGKILL)
            child.process.wait()
