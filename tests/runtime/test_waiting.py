"""Orders that an engine has no room for: given again, later and later; taken back when the job is complete."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.engines.base import EngineError, Order
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import child as child_module
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.process.identity import UNKNOWN


class Waiting:
    """A process that never gets room."""

    pid, identity, place = 0, UNKNOWN, "waiting for {CPU: 4}"

    def __init__(self) -> None:
        self.order = Order("trainer", 0, "")
        self.ended, self.signals = threading.Event(), list[int]()

    def await_made(self) -> Any:
        self.ended.wait()
        return UNKNOWN

    def poll(self) -> int | None:
        return -signal.SIGTERM if self.ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("role", timeout or 0.0)
        return -signal.SIGTERM

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)
        self.ended.set()


def test_it_is_asked_again_later_and_later_and_not_at_regular_times(
    etcd: Etcd, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_module, "ROOM_SECONDS", 64.0)
    monkeypatch.setattr(child_module, "ROOM_LIMIT", 1000.0)
    process, refused = Waiting(), EngineError("no machine is there", rule="engine")
    engine = Mock(host="", start=Mock(side_effect=[*[refused] * 4, process]))
    supervisor = Supervisor(tmp_path, keys, etcd, "", engine)
    child = supervisor.add("trainer", 0)
    for most in (64.0, 128.0, 256.0):
        assert child.restart_at is not None
        assert most / 2 - 1 <= child.restart_at - child.started_at <= most + 1
        child.restart_at = child.started_at
        supervisor.step(0.0)
    assert "trainer 0 cannot be started (no machine is there)" in caplog.text
    child.restart_at = 0.0
    supervisor.step(0.0)
    assert (child.restart_at, child.refused, engine.start.call_count) == (None, 0, 5)
    assert (child.failures, child.preemptions, supervisor.failed) == (0, 0, "")
    supervisor.take_back_orders()
    assert supervisor.all_done
    assert process.signals == [signal.SIGTERM]
    supervisor.step(0.2)
    assert engine.start.call_count == 5, "what was taken back is not ordered again"
    supervisor.stop()
