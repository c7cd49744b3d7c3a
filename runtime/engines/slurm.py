"""Slurm: each process of a role is a job step of its own, started by `srun`.

Inside an allocation (of `sbatch` or `salloc`) the steps lie in it. Trainers take CPUs and GPUs of it, and wait while
none are free; pservers and coordinators, without which no trainer works, share what there is, so that they never wait.
Elsewhere, on a login node, each process gets an allocation of its own, trainers after the others, for which they would
wait. It waits in Slurm's queue; the options of its job come from srun's environment variables (SLURM_PARTITION,
SLURM_TIMELIMIT, SLURM_ACCOUNT, ...).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import graphft
from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, EngineError, Listed, Order, Run
from graphft.runtime.engines.slurm_step import SlurmStep
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.process.log_tail import last_lines
from graphft.runtime.transport.address import advertise_host

log = logging.getLogger("graphft")

KEPT = ("SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTER_NAME")
"""What srun is to know of the job that it is in. The others would be options of each step: those of the whole job."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
"""Between two tries of what Slurm refuses at once: a partition that there is not, more CPUs than a node has."""
CLOSE_SECONDS = 3.0
NODES_ASKED = 20


@dataclass(slots=True)
class _Refusal:
    why: str
    again_at: float
    wait: float


@dataclass(frozen=True, slots=True)
class Slurm:
    """Slurm. What the trainers take is said to sbatch; see `graphft slurm`."""

    def open(self, run: Run) -> Engine:
        return SlurmEngine(run)


class SlurmEngine(Engine):
    """Of one run. In `run.resources`: CPU, GPU, or any number that is an option of srun: {"trainer": {"CPU": 4,
    "mem": 8000}}. What is not said there of a trainer is what the batch script's job gives to each of its tasks."""

    reaches_loopback = False

    def __init__(self, run: Run, environ: Mapping[str, str] = os.environ) -> None:
        self._run, self._environ = run, environ
        self._allocated = "SLURM_JOB_ID" in environ
        self._srun = shutil.which("srun", path=environ.get("PATH"))
        if self._srun is None:
            raise UsageError(
                "there is no srun in the PATH: Slurm's commands are not on this machine",
                rule="engine",
                help="start it on a login node of the cluster, or in a batch script (graphft slurm JOB prints one)",
            )
        self._steps: list[SlurmStep] = []
        self._refusals: dict[tuple[str, int], _Refusal] = {}
        self._cancelled = False
        self._etcd: EmbeddedEtcd | None = None

    @property
    def host(self) -> str:
        """This machine's address, as the nodes reach it."""
        nodes = self._environ.get("SLURM_JOB_NODELIST")
        command = ["sinfo", "--noheader", "--Node", "--format=%o", *([f"--nodes={nodes}"] if nodes else [])]
        done = subprocess.run(command, env=dict(self._environ), capture_output=True, text=True, check=False)
        return advertise_host(done.stdout.split()[:NODES_ASKED])

    def prepare(self) -> None:
        """Steps need nothing beforehand."""

    def provide_etcd(self) -> str:
        """Its data are not in the job's folder, which is on a file system of all nodes: too slow for etcd. The job goes
        on from its newest checkpoint in the next one."""
        data = tempfile.mkdtemp(prefix="graphft-etcd-")
        self._etcd = EmbeddedEtcd(data, host=self.host)
        return ",".join(self._etcd.start().endpoints)

    def start(self, order: Order) -> SlurmStep:
        self._look()
        refusal = self._refusals.get((order.role, order.index))
        if self._cancelled or (refusal is not None and time.monotonic() < refusal.again_at):
            why = refusal.why if refusal is not None else "all orders were taken back"
            raise EngineError(f"Slurm refuses it: {why}", rule="slurm", help="see `sinfo`, and the options of srun")
        served = [step for step in self._steps if step.order.role != "trainer"]
        after = served if order.role == "trainer" and not self._allocated else ()
        step = SlurmStep(order, self.command(order), self._role_environment(), self._run.log(order), after)
        self._steps.append(step)
        return step

    def list(self) -> Sequence[Listed]:
        self._look()
        return [
            Listed(step.order.role, step.order.index, step.place, "running" if step.pid else "waiting", step.pid)
            for step in self._steps
        ]

    def logs(self, order: Order, lines: int) -> Sequence[str]:
        return last_lines(self._run.log(order), lines)

    def step(self) -> None:
        self._look()
        for step in self._steps:
            step.give_up()
        if self._etcd is not None and not self._etcd.running:
            log.warning("etcd died, starting it again with its data")
            self._etcd.start()

    def cancel_orders(self) -> None:
        self._cancelled = True
        for step in self._steps:
            step.take_back()

    def close(self) -> None:
        self._cancelled = True
        for step in self._steps:
            step.send_signal(signal.SIGKILL)
        end = time.monotonic() + CLOSE_SECONDS
        while any(step.poll() is None for step in self._steps) and time.monotonic() < end:
            time.sleep(0.05)
        for step in self._steps:
            step.give_up(0.0)
        if self._etcd is not None:
            self._etcd.stop()
            shutil.rmtree(self._etcd.data_dir, ignore_errors=True)

    def command(self, order: Order) -> Sequence[str]:
        """The srun that runs it."""
        assert self._srun is not None
        name = f"{order.role}-{order.index}"
        shared = order.role != "trainer"
        room = ["--overlap" if shared else "--exact"] if self._allocated else []
        return [
            self._srun,
            *room,
            "--nodes=1",
            "--ntasks=1",
            "--input=none",
            f"--job-name={name if self._allocated else f'{self._run.job_dir.name}.{name}'}",
            *_resources(
                {**(self._task() if order.role == "trainer" else {}), **self._run.resources.get(order.role, {})}
            ),
            sys.executable,
            "-m",
            "graphft.runtime.engines.slurm_task",
            order.role,
            f"--job={self._run.job}",
            f"--etcd={order.etcd}",
            f"--index={order.index}",
        ]

    def _task(self) -> Mapping[str, float]:
        """The CPUs and GPUs of a task of the batch script: a trainer takes as many, unless it is told otherwise."""
        tasks = int(self._environ.get("SLURM_NTASKS_PER_NODE", 1))
        cpus, gpus = (self._environ.get(f"SLURM_{name}", "") for name in ("CPUS_PER_TASK", "GPUS_PER_NODE"))
        count = gpus.rpartition(":")[2]  # a100:4
        return {"CPU": int(cpus or 1), **({"GPU": int(count) // tasks} if count else {})}

    def _role_environment(self) -> dict[str, str]:
        """srun hands it to the role."""
        kept = {
            name: value
            for name, value in self._environ.items()
            if name in KEPT or not (self._allocated and name.startswith(("SLURM_", "SRUN_")))
        }
        package = str(Path(graphft.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package, self._environ.get("PYTHONPATH", "")]))
        return {**kept, **self._run.environment, "PYTHONPATH": path}

    def _look(self) -> None:
        """Forgets what has ended, and notes what Slurm refuses."""
        for step in self._steps:
            key = (step.order.role, step.order.index)
            if step.pid:
                self._refusals.pop(key, None)
            elif step.refused:
                before = self._refusals.get(key)
                wait = min(LONGEST_WAIT_SECONDS, 2 * before.wait) if before else FIRST_WAIT_SECONDS
                self._refusals[key] = _Refusal(step.refused, time.monotonic() + wait, wait)
        self._steps = [step for step in self._steps if step.poll() is None]


def _resources(wanted: Mapping[str, float]) -> list[str]:
    """As options of srun. Without GPU none: a step that does not say so would take all of its job's."""
    names = {"CPU": "--cpus-per-task={:.0f}", "GPU": "--gres=gpu:{:.0f}"}
    options = [names.get(name, f"--{name}={{:g}}").format(count) for name, count in wanted.items()]
    return options if wanted.get("GPU") else [*options, "--gres=none"]
