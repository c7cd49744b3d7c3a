"""The launcher looks at its job's status, keeps its own etcd, and waits for records that etcd has lost."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from graphft.errors import GraphftError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError, EtcdUnreachable
from graphft.runtime.launcher import supervise as module
from graphft.runtime.launcher.supervise import LOST_SECONDS, EtcdKeeper, _Look, _registered, why_failed
from graphft.runtime.process.identity import Identity
from graphft.runtime.roles.environment import ROLES
from tests.support.disks import small_file_system
from tests.support.etcd_servers import pause, pid_of
from tests.support.waiting import until


def test_who_is_registered_of_each_role() -> None:
    identities = {role: Identity(pid=pid) for pid, role in enumerate(ROLES, 1)}
    members = {f"{role}s": {"x": {"process": msgspec.to_builtins(found)}} for role, found in identities.items()}
    status = replace(JobStatus("j", "running", {}, 0, 0, 0, None), **members)
    assert _registered(status) == set(identities.values())


def test_the_last_look_waits_for_an_etcd_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []

    def read(etcd: Any, keys: Any, *, deadline: float, brief: bool, begins: int) -> JobStatus:
        deadlines.append(deadline)
        if deadline < 5.0:
            raise EtcdUnreachable("no answer")
        return JobStatus("j", "complete", {}, 0, 0, 0, None)

    monkeypatch.setattr(module, "read_status", read)
    etcd = SimpleNamespace(is_full=lambda: False)
    ended: Any = SimpleNamespace(all_done=True, failed="", etcd=etcd, keys=Keys("j"))
    last = module.supervise(ended, [])
    assert (last is not None, why_failed(ended, last), len(deadlines)) == (True, "", 1)


def test_an_etcd_that_died_or_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
    with EmbeddedEtcd(tmp_path) as server:
        with Etcd(server.endpoints, deadline=60) as client:
            client.put("/a", b"1")
        supervisor: Any = Mock()
        keeper, first = EtcdKeeper(server, supervisor), pid_of(server)
        pause(server)
        keeper.heard(False)
        time.sleep(0.2)
        keeper.step()
        second = pid_of(server)
        assert second != first
        server.kill()
        keeper.step()
        assert pid_of(server) != second
        told = [call.args[1] for call in supervisor.events.emit.call_args_list]
        assert [text.split()[1] for text in told] == ["has", "died;"]
        with Etcd(server.endpoints, deadline=60) as client:
            assert client.get("/a") is not None


def test_an_etcd_whose_data_are_gone_is_not_started_empty(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path / "etcd") as server:
        keeper = EtcdKeeper(server, Mock())
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
        keeper = EtcdKeeper(server, Mock())
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        for _ in range(3):
            keeper.heard(False)
            keeper.step()
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


KNOWN = cast("JobStatus", object())


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_what_was_known_stays_until_it_is_recorded_again(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    look = _Look(etcd, Keys("lost"), 0)
    with pytest.raises(GraphftError, match="etcd knows no job named lost"):
        look(None)  # it was never there
    for _ in range(2):
        assert look(KNOWN) is KNOWN
        clock.now += LOST_SECONDS - 1
        assert look(KNOWN) is KNOWN
        monkeypatch.setattr(module, "read_status", Mock(return_value=KNOWN))
        assert look(None) is KNOWN  # and what comes after that counts from then
        monkeypatch.setattr(module, "read_status", read_status)
        clock.now += 5
    assert look(KNOWN) is KNOWN
    clock.now += LOST_SECONDS + 1
    with pytest.raises(GraphftError, match="etcd has lost the records of job lost") as caught:
        look(KNOWN)
    assert "it goes on from its newest checkpoint" in caught.value.help
