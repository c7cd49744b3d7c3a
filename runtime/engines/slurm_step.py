"""One `srun` that runs one process of a role."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from graphft.runtime.engines.base import Order
from graphft.runtime.engines.remote_step import RemoteStep


class SlurmStep(RemoteStep):
    """A role on one of Slurm's nodes, or the wish for one. `after`: others that are to be in its queue before it."""

    error_prefix = "srun: error: "

    def __init__(
        self,
        order: Order,
        srun: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        after: Sequence[RemoteStep] = (),
    ) -> None:
        super().__init__(order, srun, environment, log, waits_for="a node", after=after)

    def hand_on(self, signum: int) -> None:
        """srun hands on no SIGTERM: it ends its step by it. scancel asks Slurm's controller, which may take a while."""
        assert self.begun is not None
        command = ["scancel", f"--signal={signal.Signals(signum).name[3:]}", self.begun.step]
        threading.Thread(target=_call, args=(command, self.environment), daemon=True).start()


def _call(command: Sequence[str], environment: Mapping[str, str]) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(environment), check=False)
