"""Stand-ins for roles, as a launcher starts them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.child import Child
from graphft.runtime.launcher.supervisor import Supervisor

SLEEP = "import time; time.sleep(100)"


class Stubs:
    """Starts children that run `code` instead of a role, and remembers when."""

    def __init__(self) -> None:
        self.code, self.arguments = SLEEP, [""]
        self.started: list[float] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, arguments: Sequence[str], log: Path, environment: Any) -> subprocess.Popen[bytes]:
        self.started.append(time.monotonic())
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            flags = ["-S"] if "graphft" not in self.code else []
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", self.code, *self.arguments, *arguments], stdout=out, stderr=out
            )
        self.processes.append(process)
        return process


def steps(supervisor: Supervisor, condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        supervisor.step(0.05)


def pid(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


def kinds(etcd: Etcd, keys: Keys) -> list[str]:
    return [event.kind for _, event in read_events(etcd, keys)]


def texts(etcd: Etcd, keys: Keys) -> list[str]:
    return [event.text for _, event in read_events(etcd, keys)]
