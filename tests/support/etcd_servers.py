"""A real etcd for tests: one server per session, a prefix of its own per test. Tests that kill a server start one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from graphft.runtime.etcd import EmbeddedEtcd, Etcd


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """The session's server. Not to be stopped or frozen by a test."""
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd(etcd_server: EmbeddedEtcd) -> Iterator[Etcd]:
    """A client of the session's server. On a machine whose disk is busy that may not answer for ten seconds."""
    with Etcd(etcd_server.endpoints, deadline=60) as client:
        yield client


@pytest.fixture
def prefix(etcd: Etcd) -> Iterator[str]:
    """A key prefix that nobody else uses, such as `/test-3f2a.../`; emptied afterwards."""
    name = f"/test-{uuid.uuid4().hex}/"
    yield name
    etcd.delete_prefix(name)
