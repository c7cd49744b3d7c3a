"""A spare role process: everything is imported and loaded, only the role is missing.

Starting Python, torch and the job takes a second or two; the launcher keeps one spare that has done so, and when a
role dies, tells it which one to be.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from graphft.runtime.process import EXIT_OK, spawn


class Standby:
    """The launcher's end of a spare."""

    def __init__(self, job_dir: Path, environment: Mapping[str, str]) -> None:
        self.process = spawn(["standby", "--job", str(job_dir)], job_dir / "logs" / "standby.log", environment,
                             stdin=subprocess.PIPE)

    def become(self, role: str, index: int, etcd: str, log: Path) -> subprocess.Popen[bytes]:
        """Makes the spare that role; its output goes to `log` from now on. Raises OSError if it is dead."""
        assert self.process.stdin is not None
        order = {"role": role, "index": index, "etcd": etcd, "log": str(log)}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.close()
        return self.process

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # an order that it did not live to read
                self.process.stdin.close()


def wait_for_role(job_dir: Path) -> int:
    """The spare's end: loads everything, waits for its role, and runs it. Returns the exit status."""
    from graphft.runtime.roles import pserver, trainer  # noqa: F401  (that they are loaded is the point)
    from graphft.runtime.roles.environment import RoleSpec, run_role
    from graphft.transpiler import Job

    job = Job.load(job_dir)
    line = sys.stdin.buffer.readline()
    if not line:
        return EXIT_OK  # the launcher has ended without needing us
    order = json.loads(line)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    return run_role(job, job_dir, RoleSpec(order["role"], order["index"], str(job_dir), order["etcd"]))
