"""The embedded server: ports, data, its end; which etcd it is, how one is installed; `graphft etcd`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from graphft.runtime.cli import main
from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError, embedded, find_etcd
from graphft.runtime.etcd.embedded import cache_dir, trusted


def test_data_outlives_kill_and_stop(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as etcd, Etcd(etcd.endpoints, deadline=60) as client:
        endpoints = etcd.endpoints
        client.put("/a", b"1")
        etcd.restart()
        assert etcd.endpoints == endpoints
        client.put("/b", b"2")
        etcd.stop()
        assert not etcd.running
        etcd.start()
        assert client.count("/") == 2
    with EmbeddedEtcd(tmp_path) as other, Etcd(other.endpoints, deadline=60) as client:
        assert client.count("/") == 2


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EtcdError) as caught:
            EmbeddedEtcd(tmp_path, port=port).start()
        assert caught.value.rule == "port-busy"
        assert str(port) in caught.value.message
        assert list(tmp_path.iterdir()) == []


def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    with pytest.raises(EtcdError) as caught:
        EmbeddedEtcd(tmp_path).start()
    assert caught.value.rule == "etcd-start"
    assert "data" in caught.value.message.split("the end of")[1]


PARENT = """
import sys
from graphft.runtime.etcd import EmbeddedEtcd
server = EmbeddedEtcd(sys.argv[1]).start()
print(server._process.pid, flush=True)
sys.stdin.readline()
"""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        etcd = psutil.Process(int(parent.stdout.readline()))
        etcd.suspend()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(120)
        psutil.wait_procs([etcd], timeout=60)
        assert not etcd.is_running()
    finally:
        parent.kill()
        parent.wait()


# -- which etcd -------------------------------------------------------------------------------------------------------


def test_trusted_versions() -> None:
    good, bad = ["3.4.21", "3.4.30", "3.5.6", "3.6.0"], ["", "3.3.25", "3.4.20", "3.5.0", "3.5.5"]
    assert [version for version in good + bad if trusted(version)] == good


def program(folder: Path, version: str) -> Path:
    """A program that says that it is this version of etcd."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "etcd"
    path.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any etcd."""
    monkeypatch.delenv("ETCD_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "checkout_dir", lambda: tmp_path / ".etcd")
    return tmp_path


def test_order_of_search(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EtcdError):
        find_etcd()
    cached = program(bare / "cache" / "graphft" / "etcd" / "usr" / "bin", "3.4.23")
    assert find_etcd() == cached
    program(bare / "bin", "3.5.1")  # on PATH, but of a version that loses data
    assert find_etcd() == cached
    on_path = program(bare / "bin", "3.6.1")
    assert find_etcd() == on_path
    monkeypatch.setenv("ETCD_BIN", str(program(bare / "chosen", "3.5.2")))
    with pytest.raises(EtcdError) as caught:
        find_etcd()
    assert "3.5.2" in caught.value.message
    chosen = program(bare / "chosen", "3.4.30")
    assert find_etcd() == chosen


def test_an_installation_without_a_checkout_gets_etcd_by_one_command(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["etcd"]) == 2
    folder = bare / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "apt-get").write_text("#!/bin/sh\n> etcd-server_3_amd64.deb\n")
    unpack = f"/bin/mkdir -p $3/usr/bin && /bin/cp {program(folder / 'unpacked', '3.4.23')} $3/usr/bin/etcd"
    (folder / "dpkg").write_text(f"#!/bin/sh\n{unpack}\n")
    for name in ("apt-get", "dpkg"):
        (folder / name).chmod(0o755)
    installed = cache_dir() / "usr" / "bin" / "etcd"
    capsys.readouterr()
    for arguments in (["etcd", "--install"], ["etcd"], ["etcd", "--install"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out == f"etcd 3.4.23: {installed}\n"
