"""`graphft etcd --serve`: an etcd for the processes of several machines."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from graphft.runtime.etcd import Etcd
from tests.support.commands import refused
from tests.support.waiting import until


def serve(data: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "graphft", "etcd", "--serve", "--data", str(data), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_it_answers_comes_back_and_ends(tmp_path: Path) -> None:
    with serve(tmp_path, "--listen", "localhost") as server:
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            with Etcd([endpoint], deadline=60.0) as etcd:
                etcd.put("/a", b"1")
                (child,) = psutil.Process(server.pid).children()
                child.kill()
                until(lambda: psutil.Process(server.pid).children() not in ([], [child]))
                found = etcd.get("/a")
                assert found is not None
                assert found.value == b"1"
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0


def test_at_another_address_than_loopbacks_usual(tmp_path: Path) -> None:
    with serve(tmp_path, "--listen", "127.0.0.2") as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("127.0.0.2:")
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--serve",), "--serve goes with --data"),
        (("--data", "x"), "--data is for --serve"),
        (("--listen", "x"), "--listen is for --serve"),
        (("--to", "x"), "--to is for --install"),
        (("--serve", "--data", "x", "--listen", "no.such.name.invalid"), "no name or address of this machine"),
    ],
)
def test_what_cannot_be(options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "etcd", *options)
