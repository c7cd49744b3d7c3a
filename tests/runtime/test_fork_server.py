"""The fork server: roles are forks of it, and the launcher's children; without it they are started from nothing."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.engines.base import Run
from graphft.runtime.engines.local import ForkServer, LocalEngine
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.supervisor import Supervisor
from tests.support.waiting import ended, until

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
NOWHERE = "not:an:endpoint"
"""A role that is to use it ends at once, with status 2."""
SILENT = "127.0.0.1:1"
"""A role that is to use it waits for an answer."""

LAUNCHER = """
import sys, time
from pathlib import Path
from graphft.runtime.engines.base import Order
from graphft.runtime.engines.local import ForkServer
folder, etcd = Path(sys.argv[1]), sys.argv[2]
fork_server = ForkServer(folder, {"OMP_NUM_THREADS": "1"})
role = fork_server.fork(Order("trainer", 0, etcd), folder / "logs" / "trainer-0.log")
while not role.pid:
    time.sleep(0.01)
print(role.pid, fork_server.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_roles_and_fork_server_die_with_the_launcher(saved: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(saved), SILENT], stdout=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdout is not None
        both = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(both) == 2
        launcher.kill()
        launcher.wait()
        until(lambda: all(map(ended, both)))


@pytest.mark.slow
def test_a_fork_server_that_dies_is_passed_over(saved: Path, etcd: Etcd, keys: Keys) -> None:
    engine = engine_of(saved)
    first = server_of(engine)
    supervisor = Supervisor(saved, keys, etcd, NOWHERE, engine)
    try:
        first.process.send_signal(signal.SIGSTOP)
        supervisor.add("trainer", 0)
        first.process.kill()
        until(lambda: not first.alive)
        supervisor.add("trainer", 1)
        logs = [saved / "logs" / f"trainer-{i}.log" for i in range(2)]
        end = time.monotonic() + 120
        while not all(log.exists() and "error[etcd-endpoint]" in log.read_text() for log in logs):
            assert time.monotonic() < end
            supervisor.step(0.1)
    finally:
        supervisor.stop()
    assert first.process.poll() is not None


@pytest.mark.slow
def test_a_job_that_cannot_be_loaded_fails_before_any_role_starts(
    saved: Path, etcd: Etcd, keys: Keys, tmp_path: Path
) -> None:
    edited = Path(shutil.copytree(saved, tmp_path / "edited"))
    program = edited / "programs" / "trainer" / "program.gft"
    program.write_text(program.read_text().replace("slots = 2", "slots = 3", 1))
    assert program.read_text() != (saved / "programs" / "trainer" / "program.gft").read_text()
    supervisor = Supervisor(edited, keys, etcd, NOWHERE, engine_of(edited))
    try:
        supervisor.add("trainer", 0)
        end = time.monotonic() + 120
        while not supervisor.failed:
            assert time.monotonic() < end
            supervisor.step(0.1)
        assert supervisor.failed.startswith("it cannot be loaded: error[")
        assert supervisor.all_done
    finally:
        supervisor.stop()
    assert not (edited / "logs" / "trainer-0.log").exists()


def engine_of(folder: Path) -> LocalEngine:
    engine = LocalEngine(Run(folder, str(folder), ENVIRONMENT))
    engine.prepare()
    return engine


def server_of(engine: LocalEngine) -> ForkServer:
    assert engine._fork_server is not None
    return engine._fork_server
