"""What a step of Slurm runs on its node: one role, of which it tells srun's starter who it is, and how it ended.

The two lines go to stdout, all that the role prints to stderr. srun's own exit status cannot tell: it is 0, too, when
the node is lost. Slurm signals all processes of a step, so nothing is forwarded here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from graphft.runtime.process.identity import Identity, identify
from graphft.runtime.process.role_process import PARENT

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are the role's."""


class Begun(msgspec.Struct, frozen=True):
    """The first line. `step`: as scancel names it."""

    pid: int
    process: Identity
    node: str
    step: str


class Ended(msgspec.Struct, frozen=True):
    """The second line. `status`: as `subprocess.Popen.returncode`."""

    status: int


def main(arguments: Sequence[str]) -> int:
    """Runs `graphft start ARGUMENTS`. Returns its exit status, as a shell would."""
    for number in ASKING:
        signal.signal(number, lambda *_: None)  # the role, started by exec, has the usual handlers
    role = subprocess.Popen(
        [sys.executable, "-m", "graphft", "start", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        env={**os.environ, PARENT: str(os.getpid())},
    )
    _tell(Begun(role.pid, identify(role.pid), _node(), f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"))
    status = role.wait()
    _tell(Ended(status))
    return status if status >= 0 else 128 - status


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _tell(line: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
