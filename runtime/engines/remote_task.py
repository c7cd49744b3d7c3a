"""The process beside one role on another machine: it tells who the role is, and how it ended, in two lines on stdout.

All that the role prints goes to stderr. The exit status of what started this (srun, ssh) cannot tell: it is 0, too,
when a node of Slurm is lost. On Slurm signals come from Slurm, which sends them to all processes of a step. Where
nobody does that, the role is tied to stdin: the number of a signal comes as a line, and the end of stdin ends the role.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from graphft.runtime.process.identity import Identity, identify
from graphft.runtime.process.role_process import PARENT, python

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are the role's."""
TIED = "--tied"
"""The first argument, if the role is tied to stdin."""


class Begun(msgspec.Struct, frozen=True):
    """The first line. `step`: as scancel names it; "" elsewhere than on Slurm."""

    pid: int
    process: Identity
    node: str
    step: str = ""


class Ended(msgspec.Struct, frozen=True):
    """The second line. `status`: as `subprocess.Popen.returncode`."""

    status: int


def main(arguments: Sequence[str]) -> int:
    """Runs `graphft start ARGUMENTS`. Returns its exit status, as a shell would."""
    for number in ASKING:
        signal.signal(number, lambda *_: None)  # the role, started by exec, has the usual handlers
    tied = arguments[0] == TIED
    role = subprocess.Popen(
        [*python(), "start", *arguments[tied:]],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        env={**os.environ, PARENT: str(os.getpid())},
        start_new_session=tied,
    )
    node, job, step = (os.environ.get(n, "") for n in ("SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    _tell(Begun(role.pid, identify(role.pid), node or socket.gethostname(), f"{job}.{step}" if step else ""))
    if tied:
        threading.Thread(target=_obey, args=(role,), daemon=True).start()
    status = role.wait()
    if tied:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(role.pid, signal.SIGKILL)  # what the role has started and left; a scheduler would do that
    _tell(Ended(status))
    return status if status >= 0 else 128 - status


def _obey(role: subprocess.Popen[bytes]) -> None:
    """Once stdin has ended, whoever wanted the role is gone, or has another one made elsewhere."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:  # a buffer has a lock, held at the end
        for line in stdin:
            role.send_signal(int(line))
    role.kill()


def _tell(line: msgspec.Struct) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody is there to be told any more
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
