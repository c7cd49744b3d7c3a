"""The launcher's own etcd is started again when it has died, and when it was stopped."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import pytest

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError
from graphft.runtime.launcher import etcd_keeper as module
from graphft.runtime.launcher.etcd_keeper import EtcdKeeper
from tests.support.disks import small_file_system
from tests.support.etcd_servers import pause
from tests.support.waiting import until


def test_an_etcd_that_died_or_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped one runs, and would never answer."""
    monkeypatch.setattr(module, "STOPPED_SECONDS", 0.1)
    with EmbeddedEtcd(tmp_path) as server:
        with Etcd(server.endpoints, deadline=60) as client:
            client.put("/a", b"1")
        told: list[str] = []
        keeper, first = EtcdKeeper(server, told.append), server.pid
        keeper.heard(False)
        time.sleep(0.2)
        keeper.heard(False)
        assert server.pid == first, "it is not stopped: it may be slow"
        pause(server)
        keeper.heard(False)
        second = server.pid
        assert second != first
        server.kill()
        keeper.step()
        assert server.pid != second
        assert told[1] == "died"
        assert told[0].startswith("has not answered for")
        with Etcd(server.endpoints, deadline=60) as client:
            assert client.get("/a") is not None


def test_an_etcd_whose_data_are_gone_is_not_started_empty(tmp_path: Path) -> None:
    """ "starting it again with its data", and then nobody knew the job."""
    with EmbeddedEtcd(tmp_path / "etcd") as server:
        keeper = EtcdKeeper(server)
        server.kill()
        shutil.rmtree(tmp_path / "etcd")
        with pytest.raises(EtcdError, match=f"its data in {tmp_path}/etcd are gone: this run cannot go on"):
            keeper.step()
        assert not server.running


def test_a_full_disk_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FULL_SECONDS", 0.0)
    with small_file_system(tmp_path / "disk", 160) as disk, EmbeddedEtcd(disk / "etcd") as server:
        keeper = EtcdKeeper(server)
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        for _ in range(3):
            keeper.heard(False)
        assert capsys.readouterr().err.count("is full (0 bytes are left); the job waits for room") == 1
        with pytest.raises(EtcdError) as caught:
            EmbeddedEtcd(disk / "other").start()
        assert caught.value.rule == "disk-full"
        monkeypatch.setattr(server, "restart", lambda: EmbeddedEtcd(disk / "other").start())
        server.kill()
        keeper.step()  # it cannot be started, and that is no failure
        monkeypatch.undo()
        (disk / "ballast").unlink()
        until(lambda: keeper.step() or server.running)
