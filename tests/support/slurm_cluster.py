"""A real Slurm of a few nodes, all on this machine: its munge, ports, files and environment are its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from graphft.runtime.etcd.embedded import free_ports
from tests.support.waiting import until

PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
_missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
MISSING = (
    f"there is no {_missing[0]}: apt-get install slurm-wlm munge"
    if _missing
    else "slurmd runs as root only"
    if os.geteuid() != 0
    else ""
)
"""The reason why there can be no Slurm here; "" if there can."""
DISCARDED = MISSING or "the whole suite leaves it out: make slurm" * ("GRAPHFT_SLURM" not in os.environ)
"""The reason why tests on it are skipped: they take minutes."""
START_SECONDS = 120.0
CPUS, GPUS = 4, 2
"""The memory of a node: more than this machine has, on paper."""
# A job that is queued again waits for `cred_expire` seconds: 120, where nothing is said.
_CONF = """ClusterName=graphft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=1,sched_interval=2
GresTypes=gpu
JobRequeue=1
ReturnToService=2
SlurmdTimeout=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = (
    f"NodeName={{name}} NodeHostname={{host}} NodeAddr=127.0.0.1 Port={{port}} CPUs={CPUS} RealMemory=2000 "
    f"Gres=gpu:{GPUS} State=UNKNOWN"
)

_GUARD = """
import os, psutil, sys

conf = sys.argv[1]
logs = os.path.dirname(conf) + os.sep

def belongs(process):  # a slurmstepd that begins has no environment to be seen
    if process.environ().get("SLURM_CONF") == conf:
        return process.pid != os.getpid()
    return process.name() == "slurmstepd" and any(file.path.startswith(logs) for file in process.open_files())

def alive():
    for process in psutil.process_iter():
        try:
            if belongs(process):
                yield process
        except psutil.Error:
            pass

sys.stdin.read()
while left := list(alive()):
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            pass
    psutil.wait_procs(left, 1)
"""
"""Ends all that has to do with a Slurm when its stdin is closed, as it is when the tests' process is killed: what Slurm
has started on a node is no child of it."""


class SlurmCluster:
    """To be used in a `with`. What is to talk to it needs `environment`."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder, self.nodes = folder, [f"n{i + 1}" for i in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self._others: list[subprocess.Popen[bytes]] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SlurmCluster:
        self._configure()
        command = [sys.executable, "-c", _GUARD, self.environment["SLURM_CONF"]]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def _configure(self) -> None:
        for name in ("munge", "state", *self.nodes):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        host = socket.gethostname().split(".")[0]
        controller, *ports = free_ports(1 + len(self.nodes))
        nodes = [_NODE.format(name=n, host=host, port=p) for n, p in zip(self.nodes, ports, strict=True)]
        conf = _CONF.format(host=host, controller=controller, folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{GPUS}]\n")

    def _start(self) -> None:
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._others.append(self._run("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files))
        self._await((munge / "socket").exists)
        self._others.append(self._run("slurmctld", "-D", "-c"))
        for name in self.nodes:
            self.start_node(name)
        self._await(lambda: self.in_state("idle") == set(self.nodes))

    def _stop(self) -> None:
        assert self._guard is not None
        self._guard.communicate()
        for process in [*self._slurmds.values(), *self._others]:
            process.wait()

    def _await(self, condition: Callable[[], object]) -> None:
        try:
            until(condition, START_SECONDS)
        except AssertionError:
            said = [path.read_text()[-1000:] for path in [*self.folder.glob("*.out"), *self.folder.glob("*.log")]]
            raise AssertionError("Slurm does not start: " + "\n".join(said)) from None

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(shutil.which(program, path=PATH)), *arguments]
        with (self.folder / f"{program}.out").open("ab") as out:
            return subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def start_node(self, name: str) -> None:
        """Also of one that was killed: it comes back, empty."""
        self._slurmds[name] = self._run("slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """It is lost: its slurmd, and all that Slurm started there, end by SIGKILL."""
        slurmd = self._slurmds.pop(name, None)
        if slurmd is None:
            return
        slurmd.send_signal(signal.SIGSTOP)  # it starts nothing any more
        doomed = self.processes(name)
        slurmd.kill()
        slurmd.wait()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self, name: str) -> list[psutil.Process]:
        """All that Slurm started on a node, parents first."""
        found, log = list[psutil.Process](), str(self.folder / f"{name}.log")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmstepd" and log in {file.path for file in process.open_files()}:
                    found += [process, *process.children(recursive=True)]
        return found

    def in_state(self, state: str) -> set[str]:
        """The nodes that are."""
        return set(self.call("sinfo", "--noheader", "--Node", f"--states={state}", "--format=%N").split())

    def call(self, *command: str | Path) -> str:
        """Returns what one of Slurm's commands prints; "" while its controller cannot answer."""
        done = subprocess.run(list(map(str, command)), env=self.environment, capture_output=True, text=True)
        return done.stdout.strip()

    @property
    def running(self) -> set[str]:
        """The nodes that were not killed."""
        return set(self._slurmds)

    def job_field(self, job: str, name: str) -> str:
        """Returns what `scontrol show job` says of a job under this name."""
        shown = self.call("scontrol", "show", "job", job).split()
        return next((word.partition("=")[2] for word in shown if word.startswith(f"{name}=")), "")

    def job_state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        return self.job_field(job, "JobState")
