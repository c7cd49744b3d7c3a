"""How much memory a process has used, and whether the kernel ended processes for lack of it. Linux only."""

from __future__ import annotations

import re
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def peak_bytes(pid: int) -> int:
    """The most memory that this process has had in use so far; 0 if that is not known."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def oom_kills() -> int | None:
    """How often the kernel killed a process of this one's control group for lack of memory; None: not known."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            files = [_GROUPS / path.lstrip("/") / "memory.events", _GROUPS / "memory.events"]
        elif controllers == "memory":
            base, name = _GROUPS / "memory", "memory.oom_control"
            files = [base / path.lstrip("/") / name, base / name]
        else:
            continue
        for file in files:
            found = re.search(r"^oom_kill (\d+)", _read(file), re.MULTILINE)
            if found:
                return int(found[1])
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
