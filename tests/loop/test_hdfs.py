"""Checkpoints on a real HDFS: the commit is a rename there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import graphft
from graphft import TrainStatus
from graphft.runtime.loop.check_points import CheckPoints
from tests.loop.loops import Loop, resumed, same, undisturbed
from tests.support.hdfs_server import HDFS, MISSING, hdfs_server

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HDFS]:
    with hdfs_server(tmp_path_factory.mktemp("hdfs")) as server:
        yield server


@pytest.fixture
def url(server: HDFS) -> str:
    return f"hdfs://127.0.0.1:{server.port}/{uuid.uuid4().hex}/run"


def save(url: str, last: int) -> None:
    """In the middle of epochs, until step `last`."""
    loop = Loop()

    class StoppedError(Exception):
        pass

    def after(status: TrainStatus) -> None:
        if status.step % 4 == 0:
            graphft.save_check_point(loop.state, status, url, keep=2)
        if status.step == last:
            raise StoppedError

    with pytest.raises(StoppedError):
        loop.train(None, after)


def test_a_loop_goes_on(url: str) -> None:
    save(url, 8)
    assert same(resumed(url), undisturbed())


def test_a_save_waits_for_servers_that_are_away(server: HDFS, url: str) -> None:
    save(url, 4)
    place = CheckPoints(url, sleep=lambda seconds: server.start())
    server.kill()
    assert place.save(Loop().state, TrainStatus(7)) == 1
    assert graphft.load_check_point(Loop().state, url) == TrainStatus(7)
