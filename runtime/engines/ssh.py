"""Machines that ssh reaches: each process of a role is a command of its own connection, and ends with it.

Nothing has to run there before. A process gets its arguments and variables on stdin: nobody sees them in a list of
processes, and no shell reads them. Signals follow there, so they need no second connection.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, EngineError, Order, Run
from graphft.runtime.engines.remote import LOOKED_AT, RemoteEngine, RemoteStep
from graphft.runtime.engines.remote_task import TIED
from graphft.runtime.process.role_process import module_paths
from graphft.runtime.transport.address import advertise_host, is_loopback

log = logging.getLogger("graphft")

HOSTS, PYTHON = "GRAPHFT_HOSTS", "GRAPHFT_PYTHON"
"""Variables that name the machines, and the interpreter there, unless the options say."""
HERE = "localhost"
"""This machine, without ssh."""
OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    *("-o", "ControlPath=none", "-o", "ClearAllForwardings=yes"),
)
"""Each process has a connection of its own: what is lost is lost for one, and sshd limits the sessions of each."""
FORWARDED = (
    *("GRAPHFT_ETCD_*", "GRAPHFT_DEBUG", "GRAPHFT_TRACE", "AWS_*", "FSSPEC_*", "HF_*"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
)
"""Patterns of variables of this process that roles get, too."""
BEGIN_SECONDS = 180.0
"""A process may take so long to begin: to connect, to log in, and to import from a slow file system."""
AGAIN_SECONDS = 10.0
"""Between two tries of a machine that refuses processes."""

BOOT = (
    "import json,os,sys;o=json.loads(sys.stdin.buffer.readline());os.environ.update(o['environment']);"
    "os.path.isdir(o['folder']) and os.chdir(o['folder']);os.execv(sys.executable,[sys.executable,*o['command']])"
)
"""Run there: takes the variables, goes to the launcher's working directory if there is one, and becomes the command."""


@dataclass(frozen=True, slots=True)
class Ssh:
    """Machines that let this user in without a password, as `ssh HOST` calls them; by default $GRAPHFT_HOSTS.

    `hosts`: names, or a text of them with commas or blanks between; `localhost` is this machine, without ssh.
    `python`: the interpreter there, which has graphft; by default $GRAPHFT_PYTHON, or the path of this one. `ssh`: the
    program, and options of its own.
    """

    hosts: Sequence[str] | str = ()
    python: str = ""
    ssh: Sequence[str] = ("ssh",)

    def open(self, run: Run) -> Engine:
        given = self.hosts or os.environ.get(HOSTS, "")
        hosts = given.replace(",", " ").split() if isinstance(given, str) else given
        if not hosts or any(not host or host.startswith("-") or len(host.split()) != 1 for host in hosts):
            raise UsageError(
                f"the engine ssh needs the names of machines, not {given!r}",
                rule="engine",
                help=f'give --hosts a,b,c, {HOSTS}, or Ssh(hosts=["a", "user@b"])',
            )
        program = shutil.which(self.ssh[0])
        if program is None:
            raise UsageError(f"there is no {self.ssh[0]} here", rule="engine", help="install OpenSSH's client")
        if run.resources:
            log.warning("resources= are not looked at: ssh knows of none")
        python = self.python or os.environ.get(PYTHON, "")
        ssh = (program, *self.ssh[1:])
        return SshEngine(run, replace(self, hosts=list(dict.fromkeys(hosts)), python=python, ssh=ssh))


class SshStep(RemoteStep):
    """A role on one of the machines."""

    def hand_on(self, signum: int) -> None:
        self.say(b"%d\n" % signum)

    def kill(self) -> None:
        """Kills the role there, so that its end is reported; the connection is cut only if nothing is heard."""
        if self.begun is not None:
            self.hand_on(signal.SIGKILL)
        else:
            super().kill()


class SshEngine(RemoteEngine[SshStep]):
    """The engine of one run. A process goes where the fewest of its role are."""

    def __init__(self, run: Run, options: Ssh) -> None:
        super().__init__(run)
        self._options, self._hosts = options, list(options.hosts)
        self._refused: dict[str, tuple[str, float]] = {}
        """By machine that takes no processes: why, and until when it is left alone."""
        self._worked = False
        """True if any process has ever begun."""

    @property
    def host(self) -> str:
        addresses = [self._address(host) for host in self._hosts[:LOOKED_AT]]
        found = advertise_host(addresses)
        if is_loopback(found) and not all(map(is_loopback, addresses)):
            raise UsageError(
                f"this machine has no address towards {', '.join(addresses)}, at which its etcd could be reached",
                rule="engine",
                help="see `ssh -G HOST`; set GRAPHFT_HOST to the address at which they reach this one, or give --etcd",
            )
        return found

    def start(self, order: Order) -> SshStep:
        self.look()
        self.check_open()
        free = [host for host in self._hosts if time.monotonic() >= self._refused.get(host, ("", 0.0))[1]]
        if not free:
            raise EngineError(f"no machine takes it now: {self._reasons()}", rule="ssh", help="see `ssh HOST`")
        host = min(free, key=lambda host: self._load(host, order.role))
        log_file, given = self.run.log(order), self._given(order)
        step = SshStep(order, self._command(host), os.environ, log_file, host=host, given=given)
        self._processes.append(step)
        return step

    def step(self) -> None:
        super().step()
        late = time.monotonic() - BEGIN_SECONDS
        for step in self._processes:
            if step.begun is None and step.asked_at < late:
                step.refuse(f"it has not begun within {BEGIN_SECONDS:.0f} s")
        if len(self._refused) == len(self._hosts) and not self._worked:
            try_it = f"`ssh HOST {self._python} -m graphft --help`"
            raise UsageError(
                f"no machine takes a process: {self._reasons()} (see {try_it}; --python names another interpreter)",
                rule="engine",
                help=f"{try_it} must work for each of them, without a password",
            )

    def noted(self, step: SshStep) -> None:
        """Leaves a machine alone for a while that refuses processes."""
        self._worked = self._worked or step.begun is not None
        why = "the connection to it is lost" if step.lost else step.refused
        if why:
            if step.host not in self._refused:
                log.warning("%s takes no process (%s); others do what they can, and it is tried again", step.host, why)
            self._refused[step.host] = (why, time.monotonic() + AGAIN_SECONDS)
        elif step.host in self._refused and step.poll() is None and step.asked_at > self._refused[step.host][1]:
            del self._refused[step.host]
            log.warning("%s takes processes again", step.host)

    def _reasons(self) -> str:
        return "; ".join(f"{host}: {why}" for host, (why, _) in self._refused.items())

    def _load(self, host: str, role: str) -> tuple[int, int]:
        there = [step.order.role for step in self._processes if step.host == host]
        return there.count(role), len(there)

    @property
    def _python(self) -> str:
        return self._options.python or sys.executable

    def _command(self, host: str) -> Sequence[str]:
        if host == HERE:
            return [self._python, "-c", BOOT]
        return [*self._options.ssh, *OPTIONS, host, f"exec {shlex.quote(self._python)} -c {shlex.quote(BOOT)}"]

    def _given(self, order: Order) -> bytes:
        """Returns what BOOT reads. An interpreter that is named has its own graphft."""
        forwarded = {name: v for name, v in os.environ.items() if any(fnmatch.fnmatch(name, p) for p in FORWARDED)}
        path = {} if self._options.python else module_paths()
        task = ["-m", "graphft.runtime.engines.remote_task", TIED]
        given = {
            "folder": os.getcwd(),
            "environment": {**forwarded, **path, **self.run.environment},
            "command": [*task, *self.run.arguments(order)],
        }
        return json.dumps(given).encode() + b"\n"

    def _address(self, host: str) -> str:
        """Returns the address that ssh's configuration has."""
        if host == HERE:
            return host
        done = subprocess.run([*self._options.ssh, "-G", host], capture_output=True, text=True, check=False)
        named = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        return named[0] if named else host.rpartition("@")[2]
