"""Role processes: how they are started, how they die with their launcher, how their end is read."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from graphft.errors import GraphftError, UsageError

ROLES = ("trainer", "pserver", "coordinator")
BEGINS = "begins as process "
"""The first line of a role's log, with its pid: what is above it was written by the process before."""
EXIT_OK = 0
EXIT_FAILED = GraphftError.exit_status
EXIT_USAGE = UsageError.exit_status
EXIT_LEASE_LOST = 75
"""The process could not rely on its lease any more and fenced itself, or etcd did not answer it at all (EX_TEMPFAIL):
start it again. It is no failure of its own, so a job outlives an etcd that is away for long."""

PARENT = "GRAPHFT_PARENT"
"""In the environment of a child that is to end with its parent: that one's process id."""
_PR_SET_PDEATHSIG = 1


def hear_of_children() -> None:
    """A process that ignores SIGCHLD, as one that is started so by another does, learns of no child's exit status."""
    ignored = hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however that happens. Linux only, elsewhere a no-op.

    `parent` is the expected parent's pid: if it died before this call, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


# argv: parent's pid, program, its arguments. The parent may have died before prctl took effect, hence getppid.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Returns the command of a program that dies with the thread that starts it, not even outliving a SIGKILL.

    `preexec_fn` is unsafe in a process with threads (gRPC's above all), so a small Python program makes the setting and
    becomes the real one by exec, in about 20 ms. Elsewhere than on Linux the program is started plainly.
    """
    if not sys.platform.startswith("linux"):
        return [*command]
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]


def python_path(environ: Mapping[str, str] = os.environ) -> str:
    """Returns PYTHONPATH of a role: this graphft, and what this process was given."""
    import graphft

    package = str(Path(graphft.__file__).resolve().parent.parent)
    return os.pathsep.join(filter(None, [package, environ.get("PYTHONPATH", "")]))


def end_by(signum: int) -> NoReturn:
    """Ends this process as this signal does that nobody handles."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # the first process of a container, which the kernel spares


def was_preempted(status: int) -> bool:
    """Whether an exit status tells of a preemption (killed from outside, lease or etcd lost) rather than a failure."""
    return status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, EXIT_LEASE_LOST)


def manner(status: int) -> Literal["asked", "killed", "crashed"]:
    """How a process ended that had not said why: as a scheduler asks it to, by SIGKILL, or by a crash."""
    if status == -signal.SIGKILL:
        return "killed"
    return "asked" if was_preempted(status) else "crashed"


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        named = [s.name for s in signal.Signals if s == -status]
        return f"killed by {named[0] if named else f'signal {-status}'}"
    known = {EXIT_OK: "done", EXIT_LEASE_LOST: "lease or etcd lost"}
    return known.get(status, f"exit status {status}")


def describe_death(status: int) -> str:
    """The same, of a process that was not to end."""
    return "exit status 0, before the job was over" if status == EXIT_OK else describe_exit(status)


def start_role(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `python -m graphft start ARGUMENTS`, its output appended to `log`; it dies with this process."""
    return spawn(["start", *arguments], log, environment)


def spawn(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `python -m graphft COMMAND` as a child that knows its parent (see `die_with_parent`).

    What it prints goes to `log`, unless `stdout` says otherwise.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **environment, "PYTHONPATH": python_path(), PARENT: str(os.getpid())}
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "graphft", *command],
            stdin=stdin,
            env=env,
            stdout=out if stdout is None else stdout,
            stderr=out,
        )
