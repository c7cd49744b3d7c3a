"""A real etcd for tests: one server per session, a prefix of its own per test. Tests that kill a server start one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError, EtcdUnreachable, free_ports
from graphft.runtime.etcd.channel import etcdrpc
from graphft.runtime.etcd.embedded import HOST
from tests.support.patient import Patient


class EmbeddedCluster:
    """Several etcd members on loopback, one folder each under `data_dir`, which is emptied: for tests of fail-over."""

    def __init__(self, data_dir: str | Path, size: int = 3, *, heartbeat: int = 50, election: int = 500) -> None:
        shutil.rmtree(data_dir, ignore_errors=True)
        ports = free_ports(2 * size)
        self.members = [
            EmbeddedEtcd(Path(data_dir, str(i)), port=ports[2 * i], peer_port=ports[2 * i + 1]) for i in range(size)
        ]
        for i, member in enumerate(self.members):
            member.name = f"member-{i}"
        cluster = ",".join(f"{m.name}=http://{HOST}:{ports[2 * i + 1]}" for i, m in enumerate(self.members))
        for member in self.members:
            member.options = (
                f"--initial-cluster={cluster}",
                f"--initial-cluster-token={self.members[0].name}",
                f"--heartbeat-interval={heartbeat}",
                f"--election-timeout={election}",
            )

    def __enter__(self) -> EmbeddedCluster:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for member in self.members for endpoint in member.endpoints]

    def start(self) -> EmbeddedCluster:
        """Starts all members and returns when each of them answers."""
        for member in self.members:
            member.launch()
        for member in self.members:
            member.await_healthy()
        return self

    def stop(self) -> None:
        for member in self.members:
            member.kill()

    def leader(self) -> EmbeddedEtcd:
        """Returns the member that leads now. `EtcdError` while there is none."""
        for member in filter(lambda member: member.running, self.members):
            with Etcd(member.endpoints) as client, contextlib.suppress(EtcdUnreachable):
                status = client.repeat(client._maintenance.Status, etcdrpc.StatusRequest(), 1.0)
                if status.leader == status.header.member_id:
                    return member
        raise EtcdError("the cluster has no leader now", rule="etcd-cluster", help="wait for the election")


def pid_of(server: EmbeddedEtcd) -> int:
    assert server._process is not None
    return server._process.pid


def pause(server: EmbeddedEtcd) -> None:
    """Freezes it (SIGSTOP), all of its threads: it keeps its connections, and answers nothing."""
    os.kill(pid_of(server), signal.SIGSTOP)
    os.waitid(os.P_PID, pid_of(server), os.WSTOPPED | os.WNOWAIT)


def resume(server: EmbeddedEtcd) -> None:
    os.kill(pid_of(server), signal.SIGCONT)


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """The session's server. Not to be stopped or frozen by a test."""
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd(etcd_server: EmbeddedEtcd) -> Iterator[Etcd]:
    """A patient client of the session's server: on a busy machine that may not answer for ten seconds."""
    with Patient(etcd_server.endpoints) as client:
        yield client


@pytest.fixture
def prefix(etcd: Etcd) -> Iterator[str]:
    """A key prefix that nobody else uses, such as `/test-3f2a.../`; emptied afterwards."""
    name = f"/test-{uuid.uuid4().hex}/"
    yield name
    etcd.delete_prefix(name)
