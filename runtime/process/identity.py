"""Identifies processes. A process id alone means something only on one machine, in one PID namespace, and for a while;
so a process is identified by the machine's boot id, its namespaces, its id and the time at which it started. A process
that cannot be seen from here is neither dead nor alive: its lease decides."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STAT = "/proc/%d/stat"
STARTED = 19
"""Index of a process's start time in `stat_of`'s fields."""
_HIDDEN = -1
"""Start time of another user's process, of which /proc shows nothing (hidepid)."""


class Identity(msgspec.Struct, frozen=True):
    """One process, and no other. `machine`: the boot id. `namespaces`: of process ids and of time, as the kernel names
    them. `started`: in clock ticks since the machine's start."""

    machine: str = ""
    namespaces: str = ""
    pid: int = 0
    started: int = 0

    @property
    def visible(self) -> bool:
        """True if this process can tell if that one lives: both see the same process ids."""
        machine, namespaces = _place()
        return bool(machine) and (self.machine, self.namespaces) == (machine, namespaces)

    @property
    def dead(self) -> bool:
        """True if it is known to have ended. False for one that cannot be seen from here."""
        return self.visible and _started(self.pid) not in (self.started, _HIDDEN)


UNKNOWN = Identity()
"""The identity of a process of which nothing is known: neither dead nor alive."""


def identify(pid: int | None = None) -> Identity:
    """Returns the identity of this process, or of a child of it. UNKNOWN if it cannot be found out."""
    pid = os.getpid() if pid is None else pid
    machine, namespaces = _place()
    started = _started(pid)
    known = bool(machine) and started not in (None, _HIDDEN)
    return Identity(machine, namespaces, pid, started or 0) if known else UNKNOWN


def _place() -> tuple[str, str]:
    """Returns (machine, namespaces) of this process. The machine is "" where /proc shows other processes than ours."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # mounted in another namespace
            return "", ""
        time = os.readlink("/proc/self/ns/time") if os.path.lexists("/proc/self/ns/time") else ""  # Linux 5.6
        return _BOOT_ID.read_text().strip(), f"{os.readlink('/proc/self/ns/pid')} {time}".strip()
    except OSError:
        return "", ""


def _started(pid: int) -> int | None:
    """Returns when the process that has this id now started; None if it has ended, though it may not be reaped yet."""
    fields = stat_of(pid)
    if not fields:
        return _HIDDEN if psutil.pid_exists(pid) else None
    return None if fields[0] in "ZX" else int(fields[STARTED])


def stat_of(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; none if it is not there, or hidden."""
    try:
        return Path(_STAT % pid).read_text().rpartition(")")[2].split()  # its name may have blanks and brackets
    except OSError:
        return []
