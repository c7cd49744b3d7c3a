"""The spare process: takes any role, and does no harm when it is dead or not needed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from graphft.runtime import supervisor as module
from graphft.runtime.etcd import Etcd
from graphft.runtime.keys import Keys
from graphft.runtime.standby import Standby
from graphft.runtime.supervisor import Supervisor

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
NOWHERE = "not:an:endpoint"
"""A role that is to use it ends at once, with status 2."""


def test_a_spare_becomes_the_role_that_it_is_told(saved: Path) -> None:
    spare, log = Standby(saved, ENVIRONMENT), saved / "logs" / "trainer-1.log"
    process = spare.become("trainer", 1, NOWHERE, log)
    assert process.wait(30) == 2
    assert "[trainer 1] error[etcd-endpoint]" in log.read_text()
    assert (saved / "logs" / "standby.log").read_text() == ""


def test_a_spare_that_is_not_needed(saved: Path) -> None:
    spare = Standby(saved, ENVIRONMENT)
    assert spare.process.stdin is not None
    spare.process.stdin.close()
    assert spare.process.wait(30) == 0
    spare.close()


def test_a_dead_spare_is_passed_over(saved: Path, etcd: Etcd, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STANDBY_AFTER_SECONDS", 0.0)
    supervisor = Supervisor(saved, keys, etcd, NOWHERE, ENVIRONMENT, standby=True)
    try:
        supervisor.step(0.0)
        (spare,) = [p for p in psutil.Process().children() if "standby" in p.cmdline()]
        spare.send_signal(signal.SIGKILL)
        psutil.wait_procs([spare], timeout=5)
        child = supervisor.add("trainer", 0)
        assert child.process is not None
        assert child.process.pid != spare.pid
        end = time.monotonic() + 30
        while not supervisor.report.failed:
            assert time.monotonic() < end
            supervisor.step(0.1)
        assert "error[etcd-endpoint]" in supervisor.report.failed
    finally:
        supervisor.close()
    assert not [p for p in psutil.Process().children() if "standby" in p.cmdline()], "the next spare was ended"


