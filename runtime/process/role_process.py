"""Role processes: how they are started, how they die with their launcher, how their end and their log are read."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from graphft.errors import GraphftError, UsageError, plain_text

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
_KEEP = 32 << 20
"""glibc takes no larger mmap threshold on 64-bit machines; buckets, at most 16 MiB, stay below it."""
ERROR_LINES = 60
"""The last lines of a log, in which the last error is looked for."""


def hear_of_children() -> None:
    """Undoes an inherited SIG_IGN of SIGCHLD, with which a process learns of no child's exit status."""
    ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however that happens. `parent` is the expected parent's
    pid: if it died before this call, this process ends at once."""
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


def python() -> list[str]:
    """Returns the command that runs `graphft` in a child. The current folder is not searched for modules, unless it is
    in `module_paths`."""
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "graphft"]


def tied(command: Sequence[str]) -> list[str]:
    """Returns the command of a program that dies with the thread that starts it, not even outliving a SIGKILL.
    `preexec_fn` is unsafe in a process with threads (gRPC's above all), so a small Python program makes the setting and
    becomes the real one by exec, in about 20 ms."""
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]


def module_paths() -> dict[str, str]:
    """Returns the environment of a child that finds each module where this process does.

    With PYTHONPATH its interpreter finds this graphft, whose `__main__` then takes all of this process's `sys.path`: a
    module beside the script that is named like one of the interpreter's (types.py) must not end it as it starts."""
    import graphft

    package = str(Path(graphft.__file__).resolve().parent.parent)
    inherited = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": inherited, "GRAPHFT_PATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def end_by(signum: int) -> NoReturn:
    """Ends this process as this signal does without a handler."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # the first process of a container, which the kernel spares


def was_preempted(status: int) -> bool:
    """True if an exit status is one of a preemption (killed from outside, lease or etcd lost) rather than a failure."""
    return status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, EXIT_LEASE_LOST)


def manner(status: int) -> Literal["asked", "killed", "crashed"]:
    """Returns how a process ended that had not said why: as a scheduler asks it to, by SIGKILL, or by a crash."""
    if status == -signal.SIGKILL:
        return "killed"
    return "asked" if was_preempted(status) else "crashed"


def describe_exit(status: int) -> str:
    """Describes the exit status of a process that was not to end."""
    if status < 0:
        named = [s.name for s in signal.Signals if s == -status]
        return f"killed by {named[0] if named else f'signal {-status}'}"
    known = {EXIT_OK: "exit status 0, before the job was over", EXIT_LEASE_LOST: "lease or etcd lost"}
    return known.get(status, f"exit status {status}")


def role_environment() -> dict[str, str]:
    """Returns variables for the environment of trainers and pservers, set before the process starts. By default glibc
    maps every large block afresh and returns it when freed, so each received bucket costs thousands of page faults:
    copying into fresh pages runs at 2 GB/s, into warm ones at 9 to 12. With these, freed blocks are kept and used
    again. They hold for glibc only; other allocators ignore them. PYTHONHASHSEED, unless the user has set it: a Dataset
    that goes through a set of words finds the same order in every process, and when the job is started again."""
    return {
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        "MALLOC_MMAP_THRESHOLD_": str(_KEEP),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(_KEEP),
    }


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
    """Starts `python -m graphft COMMAND` as a child that knows its parent (see `die_with_parent`). What it prints goes
    to `log`, unless `stdout` says otherwise."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **environment, **module_paths(), PARENT: str(os.getpid())}
    with log.open("ab") as out:
        return subprocess.Popen(
            [*python(), *command], stdin=stdin, env=env, stdout=out if stdout is None else stdout, stderr=out
        )


# -- what is known of its end -----------------------------------------------------------------------------------------


def last_lines(log: Path, count: int) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-count:] if log.exists() else []


def error_in(lines: Sequence[str]) -> str:
    """Returns the last of our errors in these lines and its remedy, on one line, behind a colon. "": none."""
    found = [i for i, line in enumerate(lines) if "error[" in line]
    if not found:
        return ""
    error, *rest = lines[found[-1] :]
    remedy = next((f" ({line})" for line in rest[:1] if line.startswith("help: ")), "")
    return ": " + plain_text(error[error.index("error[") :] + remedy)


def oom_kills() -> int | None:
    """Returns how often the kernel killed a process of this control group (version 2) for lack of memory; None: not
    known."""
    try:
        group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[:1]
    except OSError:
        return None
    places = [Path("/sys/fs/cgroup", *group), Path("/sys/fs/cgroup")]  # the second: in a container
    found = (_number_in(place / "memory.events", r"^oom_kill (\d+)") for place in places)
    return next((number for number in found if number is not None), None)


def _number_in(file: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
