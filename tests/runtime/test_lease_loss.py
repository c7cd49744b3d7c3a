"""A pserver that cannot rely on its lease any more ends itself, before anybody else may take its place."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import KV, EmbeddedEtcd
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_LEASE_LOST
from graphft.transpiler import Job
from tests.support.etcd_servers import pause, resume
from tests.support.patient import Patient
from tests.support.waiting import until

TTL, LONG_TTL = 10, 20
"""Seconds; the holder trusts it for 80% of that."""
PSERVERS = """
import os, sys, threading, time
from graphft.runtime.roles.environment import RoleSpec, run_role
from graphft.runtime.roles.role import SeenView
from graphft.transpiler import Job

def hangs(self):
    threading.Event().wait()

def dies(self):
    raise RuntimeError("out of order")

def run(kind, endpoints):
    SeenView.watch = {"hangs": hangs, "dies": dies}.get(kind, SeenView.watch)
    return run_role(Job.load(kind), kind, RoleSpec("pserver", 0, etcd=endpoints))

def leave(status, leave=os._exit):
    with open(kind + ".left", "w") as file:
        file.write(str(time.monotonic()))
    leave(status)

kinds = {}
for argument in sys.argv[1:]:
    kind, endpoints = argument.split("=")
    if not (pid := os.fork()):  # nothing of gRPC was used so far
        os.dup2(os.open(kind + ".log", os.O_WRONLY | os.O_CREAT), 2)
        os._exit = leave
        leave(run(kind, endpoints))
    kinds[pid] = kind
while kinds:
    pid, status = os.wait()
    with open(kinds.pop(pid) + ".status", "w") as file:
        file.write(f"{os.waitstatus_to_exitcode(status)}.")
"""


class Pserver:
    """A process that serves, or has ended already. `kind` says what happens to it."""

    def __init__(self, job: Job, folder: Path, server: EmbeddedEtcd, kind: str) -> None:
        self.folder, self.server, self.kind = folder, server, kind
        self.ttl = TTL if kind == "hangs" else LONG_TTL
        name = f"{folder.parent.name}-{kind}"[-60:]
        Job(job.source, job.config.replace(name=name, lease_ttl=self.ttl), job.programs).save(folder / kind)
        self.keys = Keys(name)

    @property
    def log(self) -> str:
        return (self.folder / f"{self.kind}.log").read_text()

    @property
    def status(self) -> str:
        """Its exit status and a dot, once it has ended."""
        file = self.folder / f"{self.kind}.status"
        return file.read_text() if file.exists() else ""

    def registration(self) -> KV | None:
        with Patient(self.server.endpoints) as etcd:
            return etcd.get(self.keys.pserver(0))

    def await_registration(self) -> KV:
        until(lambda: self.registration() is not None or self.status)
        found = self.registration()
        assert found is not None, self.log
        return found

    def end(self) -> int:
        until(lambda: self.status.endswith("."))
        return int(self.status[:-1])


@pytest.fixture(scope="module")
def pservers(
    tmp_path_factory: pytest.TempPathFactory, etcd_server: EmbeddedEtcd, job: Job
) -> Iterator[dict[str, Pserver]]:
    """One of each kind, started side by side."""
    folder = tmp_path_factory.mktemp("lease") / "jobs"
    folder.mkdir()
    with EmbeddedEtcd(folder / "etcd") as own:
        kinds = {"dies": etcd_server, "hangs": etcd_server, "revoked": etcd_server, "frozen": own}
        started = {kind: Pserver(job, folder, server, kind) for kind, server in kinds.items()}
        parent = subprocess.Popen(
            [
                sys.executable,
                "-c",
                PSERVERS,
                *(f"{kind}={','.join(server.endpoints)}" for kind, server in kinds.items()),
            ],
            cwd=folder,
        )
        try:
            yield started
        finally:
            for process in [*psutil.Process(parent.pid).children(), parent]:
                process.kill()
            parent.wait()


@pytest.mark.slow
def test_a_daemon_thread_that_dies_takes_the_process_along(pservers: dict[str, Pserver]) -> None:
    """A process whose renewing thread has died must not live on without a lease."""
    pserver = pservers["dies"]
    assert pserver.end() == EXIT_FAILED
    assert "RuntimeError: out of order" in pserver.log


@pytest.mark.slow
def test_a_daemon_thread_that_hangs_is_noticed_by_the_loop(pservers: dict[str, Pserver]) -> None:
    pserver = pservers["hangs"]
    assert pserver.end() == EXIT_LEASE_LOST
    assert "no renewal was answered for 80% of its TTL" in pserver.log


def test_a_revoked_lease_ends_the_process(pservers: dict[str, Pserver]) -> None:
    pserver = pservers["revoked"]
    with Patient(pserver.server.endpoints) as etcd:
        assert etcd.lease_revoke(pserver.await_registration().lease)
    assert pserver.end() == EXIT_LEASE_LOST
    assert "lease lost" in pserver.log


@pytest.mark.slow
def test_a_process_without_etcd_ends_before_its_lease_can_have(pservers: dict[str, Pserver]) -> None:
    """A process that cannot renew its lease ends itself (75) before the lease can expire."""
    pserver = pservers["frozen"]
    pserver.await_registration()
    pause(pserver.server)
    frozen = time.monotonic()
    try:
        assert pserver.end() == EXIT_LEASE_LOST
        left = float((pserver.folder / "frozen.left").read_text())  # this process may be slow to see it
        assert left - frozen < pserver.ttl, "somebody else may serve this shard by now"
    finally:
        resume(pserver.server)
