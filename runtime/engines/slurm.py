"""Slurm: each process of a role is a job step of its own, started by `srun`.

The steps lie in the launcher's allocation (of `sbatch` or `salloc`). Trainers take CPUs and GPUs of it, and
wait while none are free; pservers and coordinators, without which no trainer works, share what there is, so that they
never wait.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, Order, Run
from graphft.runtime.engines.remote import LOOKED_AT, RemoteEngine, RemoteStep
from graphft.runtime.process.role_process import module_paths
from graphft.runtime.transport.address import advertise_host

log = logging.getLogger("graphft")

KEPT = ("SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTER_NAME")
"""Variables that tell srun of the job that it is in. The others would be options of each step: those of the whole
job."""


@dataclass(frozen=True, slots=True)
class Slurm:
    """The allocation that this process is in. What the trainers take is an option of sbatch; see `graphft slurm`."""

    def open(self, run: Run) -> Engine:
        return SlurmEngine(run)


class SlurmStep(RemoteStep):
    """A role on one of Slurm's nodes, or the wish for one."""

    error_prefix = "srun: error: "

    def hand_on(self, signum: int) -> None:
        # srun hands on no SIGTERM: it ends its step by it. scancel asks Slurm's controller, which may take a while.
        assert self.begun is not None
        command = ["scancel", f"--signal={signal.Signals(signum).name[3:]}", self.begun.step]
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": dict(self.environment)}
        threading.Thread(target=subprocess.run, args=(command,), kwargs=quiet, daemon=True).start()


class SlurmEngine(RemoteEngine[SlurmStep]):
    """The engine of one run. In `run.resources`: CPU, GPU, or any number that is an option of srun: {"trainer": {"CPU":
    4, "mem": 8000}}. What is not said there of a trainer is what the batch script's job gives to each of its tasks."""

    def __init__(self, run: Run, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(run)
        self._environ = environ
        self._srun = shutil.which("srun", path=environ.get("PATH")) or ""
        if not self._srun or "SLURM_JOB_ID" not in environ:
            raise UsageError(
                "the engine slurm needs an allocation: no srun in the PATH, or no SLURM_JOB_ID",
                rule="engine",
                help="start it in a batch script (graphft slurm JOB prints one), or by salloc",
            )
        self._refused = ""
        """The last reason that a person was told."""

    @property
    def host(self) -> str:
        """This machine's address, as the nodes reach it."""
        nodes = self._environ["SLURM_JOB_NODELIST"]
        command = ["sinfo", "--noheader", "--Node", "--format=%o", f"--nodes={nodes}"]
        done = subprocess.run(command, env=dict(self._environ), capture_output=True, text=True, check=False)
        return advertise_host(done.stdout.split()[:LOOKED_AT])

    def start(self, order: Order) -> SlurmStep:
        self.look()
        self.check_open()
        environment, log_file = self._role_environment(), self.run.log(order)
        step = SlurmStep(order, self.command(order), environment, log_file)
        self._processes.append(step)
        return step

    def noted(self, step: SlurmStep) -> None:
        """Reports a refusal, once: the supervisor tries it again, later and later."""
        if step.refused and step.refused != self._refused:
            self._refused = step.refused
            log.warning("Slurm refuses %s: %s; it is tried again (see `sinfo`)", step.order.name, step.refused)

    def command(self, order: Order) -> Sequence[str]:
        """Returns the srun that runs it."""
        shared = order.role != "trainer"
        return [
            self._srun,
            "--overlap" if shared else "--exact",
            "--nodes=1",
            "--ntasks=1",
            "--input=none",
            f"--job-name={order.role}-{order.index}",
            *_resources({**({} if shared else self._task()), **self.run.resources.get(order.role, {})}),
            sys.executable,
            "-m",
            "graphft.runtime.engines.remote_task",
            *self.run.arguments(order),
        ]

    def _task(self) -> Mapping[str, float]:
        """Returns the CPUs and GPUs of a task of the batch script: a trainer takes as many, unless run.resources says
        otherwise."""
        tasks = int(self._environ.get("SLURM_NTASKS_PER_NODE", 1))
        cpus, gpus = (self._environ.get(f"SLURM_{name}", "") for name in ("CPUS_PER_TASK", "GPUS_PER_NODE"))
        count = gpus.rpartition(":")[2]  # a100:4
        return {"CPU": int(cpus or 1), **({"GPU": int(count) // tasks} if count else {})}

    def _role_environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in self._environ.items()
            if name in KEPT or not name.startswith(("SLURM_", "SRUN_"))
        }
        return {**kept, **self.run.environment, **module_paths()}


def _resources(wanted: Mapping[str, float]) -> list[str]:
    """Returns options of srun. Without GPU none: a step that does not say so would take all of its job's."""
    names = {"CPU": "--cpus-per-task={:.0f}", "GPU": "--gres=gpu:{:.0f}"}
    options = [names.get(name, f"--{name}={{:g}}").format(count) for name, count in wanted.items()]
    return options if wanted.get("GPU") else [*options, "--gres=none"]
