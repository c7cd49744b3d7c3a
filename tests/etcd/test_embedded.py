"""The embedded server: ports, data, its end, and which etcd it is."""

from __future__ import annotations

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

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError


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
        with pytest.raises(EtcdError, match="runs already"):
            etcd.launch()
    with EmbeddedEtcd(tmp_path) as other, Etcd(other.endpoints, deadline=60) as client:
        assert client.count("/") == 2


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EtcdError, match=f"127.0.0.1:{port}: the port is in use") as caught:
            EmbeddedEtcd(tmp_path, port=port).start()
        assert "choose another port" in caught.value.help
        assert list(tmp_path.iterdir()) == []


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
        with Etcd(etcd.endpoints, deadline=60) as client:
            client.ping(deadline=60)
    finally:
        etcd.stop()


PARENT = """
import sys
from graphft.runtime.etcd import EmbeddedEtcd
server = EmbeddedEtcd(sys.argv[1]).start()
print(server.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["killed", "frozen and killed", "forgot to stop it"])
def test_it_dies_with_its_parent(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdin is not None
        assert parent.stdout is not None
        etcd = psutil.Process(int(parent.stdout.readline()))
        if how == "frozen and killed":
            etcd.suspend()
        assert etcd.is_running()
        if how == "forgot to stop it":
            parent.stdin.close()
        else:
            os.kill(parent.pid, signal.SIGKILL)
        parent.wait(120)
        psutil.wait_procs([etcd], timeout=60)
        assert not etcd.is_running()
    finally:
        parent.kill()
        parent.wait()
