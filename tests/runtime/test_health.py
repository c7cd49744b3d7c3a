"""A role answers a scheduler's probes, and ends under one as it is asked to."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from graphft.errors import UsageError
from graphft.runtime.process.http_server import CLIENTS
from graphft.runtime.roles import health as attendance_module
from graphft.runtime.roles.health import Attendance, Health, serve_health
from graphft.transpiler.job import Job
from tests.runtime.trainers import Staged
from tests.support.waiting import until

LIVE, READY = "/healthz", "/readyz"


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_over_http() -> None:
    health = Health()
    port = serve_health(health, "127.0.0.1:0")
    assert ask(port, LIVE) == (200, "starting\n")
    assert ask(port, READY) == (503, "starting\n")
    assert ask(port, "/") == (404, "there is no /, but /healthz and /readyz\n")
    health.over = True
    assert ask(port, LIVE) == ask(port, READY) == (200, "the job is over\n")


def test_clients_that_never_ask_take_few_threads_and_no_turn() -> None:
    port, before = serve_health(Health(), "127.0.0.1:0"), threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * CLIENTS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"GET /")  # and the rest by drips
        assert ask(port, LIVE)[0] == 200
        until(lambda: threading.active_count() <= before + CLIENTS)
        assert client.recv(1) == b"", "the time of a whole request is bounded"
    until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("address", ["host:65536", "192.0.2.1:1"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UsageError, match=r"^error\[health\]"):
        serve_health(Health(), address)


def test_of_a_trainer(staged: Staged, job: Job) -> None:
    scene = staged(job)
    health, trainer = Health(), scene.trainer(0)
    health.process = trainer
    assert health.answer(READY)[0] == health.answer(LIVE)[0] == 200
    progress = trainer.member.progress
    progress.begin("computing")
    assert health.answer(LIVE) == (200, "trainer 0: computing")
    progress.last = time.monotonic() - progress.limit - 7
    status, why = health.answer(LIVE)
    assert status == health.answer(READY)[0] == 503
    assert re.fullmatch(r"no progress for \d+ s while computing, limit 54 s", why)
    progress.beat()
    assert health.answer(LIVE)[0] == 200
    trainer.member.session.page.ended = 1  # as its keeper notes
    assert health.answer(LIVE) == (503, "the lease is lost")
    trainer.end.closing.set()
    assert health.answer(LIVE)[0] == 200, "a process that ends is not to be killed for that"
    assert health.answer(READY) == (503, "ending")


def test_statuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attendance = Attendance("", False, 143)
    assert [attendance.end(status, tmp_path) for status in (0, 1, 75)] == [143, 1, 75]
    monkeypatch.setattr(attendance_module, "is_complete", lambda folder: folder == tmp_path)
    assert [attendance.end(status, tmp_path) for status in (0, 1, 75)] == [0, 1, 75]
    assert attendance.health.over
