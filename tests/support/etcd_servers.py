"""A real etcd for tests: one server per session, a prefix of its own per test. Tests that kill a server start one."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from tests.support.patient import Patient


def pause(server: EmbeddedEtcd) -> None:
    """Freezes it (SIGSTOP), all of its threads: it keeps its connections, and answers nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)


def resume(server: EmbeddedEtcd) -> None:
    os.kill(server.pid, signal.SIGCONT)


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
