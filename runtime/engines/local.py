"""The engine of this machine: roles are forks of the fork server, or are started from nothing."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, Order, Process, Run
from graphft.runtime.engines.fork_server import SUPPORTED, ForkServer
from graphft.runtime.process.identity import identify
from graphft.runtime.process.role_process import ERROR_LINES, EXIT_USAGE, error_in, last_lines, start_role

log = logging.getLogger("graphft")


class Started(Process):
    """A role that was started from nothing."""

    def __init__(self, order: Order, process: subprocess.Popen[bytes]) -> None:
        super().__init__(order)
        self.process, self.pid, self.identity = process, process.pid, identify(process.pid)
        self._made.set()

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    def send_signal(self, signum: int) -> None:
        self.process.send_signal(signum)


@dataclass(frozen=True, slots=True)
class Local:
    """This machine. `fork_server`: roles are forks of a process that has loaded the job already (Linux)."""

    fork_server: bool = True

    def open(self, run: Run) -> Engine:
        if run.resources:
            log.warning("resources= are not looked at: the processes run on this machine, as it is")
        return LocalEngine(run, fork_server=self.fork_server)


class LocalEngine(Engine):
    """`fork_server`: see `Local`."""

    def __init__(self, run: Run, *, fork_server: bool = True) -> None:
        super().__init__(run)
        self._forks = fork_server and SUPPORTED
        self._fork_server: ForkServer | None = None

    def prepare(self) -> None:
        if self._forks and self._fork_server is None:
            self._fork_server = ForkServer(self.run.job_dir, self.run.environment)

    def start(self, order: Order) -> Process:
        log_file = self.run.log(order)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        process: Process | None = None
        if self._fork_server is not None:
            try:
                process = self._fork_server.fork(order, log_file)
            except OSError:
                self._drop_fork_server(self._fork_server, "is dead")
        if process is None:
            arguments = [order.role, "--job", str(self.run.job_dir), "--etcd", order.etcd, "--index", str(order.index)]
            process = Started(order, start_role(arguments, log_file, self.run.environment))
        self._processes = [p for p in self._processes if p.poll() is None] + [process]
        return process

    def step(self) -> None:
        if self._fork_server is not None and self._fork_server.stuck:
            self._drop_fork_server(self._fork_server, "does not answer, killing it")

    def cancel_orders(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    def close(self) -> None:
        self.cancel_orders()

    def _drop_fork_server(self, fork_server: ForkServer, why: str) -> None:
        """Ends it: from now on roles are started from nothing. Raises UsageError if it found that the job cannot be
        loaded: no role could load it either."""
        log_file = self.run.job_dir / "logs" / "fork-server.log"
        useless = fork_server.process.poll() == EXIT_USAGE
        fork_server.close()
        self._fork_server = None
        if useless:
            raise UsageError(f"it cannot be loaded{error_in(last_lines(log_file, ERROR_LINES))}", rule="job-directory")
        log.warning("the fork server %s: roles start more slowly from now on; see %s", why, log_file)
