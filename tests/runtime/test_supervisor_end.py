"""How a supervisor ends, and what is left behind: nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from graphft.errors import UsageError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd, EtcdUnreachable
from graphft.runtime.launcher import child as child_module
from graphft.runtime.launcher import supervisor as module
from graphft.runtime.launcher.child import Child
from graphft.runtime.launcher.supervise import supervise as supervise_job
from tests.runtime.stubs import SLEEP, Stubs, pid, steps, texts
from tests.support.waiting import until


def test_stop_ends_stopped_children_and_those_that_ignore_sigterm(supervise: Any, stubs: Stubs, tmp_path: Path) -> None:
    supervisor = supervise()
    stopped = supervisor.add("trainer", 0)
    supervisor.signal("trainer", 0, signal.SIGSTOP)
    supervisor.stop(grace=60.0)
    supervisor = supervise()
    stubs.code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"
    stubborn = supervisor.add("trainer", 1)
    steps(supervisor, lambda: "up" in (tmp_path / "logs" / "trainer-1.log").read_text())
    supervisor.stop(grace=0.5)
    assert (stopped.process.poll(), stubborn.process.poll()) == (-signal.SIGTERM, -signal.SIGKILL)


LATE = """
import os, signal
def start(*_):
    child = os.fork()
    if not child:
        signal.pause()
    print("started", child, flush=True)
signal.signal(signal.SIGTERM, start)
print("up", flush=True)
while True:
    signal.pause()
"""


def test_what_a_role_starts_when_it_is_told_to_end_ends_with_it(
    supervise: Any, stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease keeper, say. It stayed, if only as a zombie, for as long as the process of a Trainer."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as a launcher does
    stubs.code = LATE
    supervisor = supervise()
    child = supervisor.add("trainer", 0)
    log = tmp_path / "logs" / "trainer-0.log"
    steps(supervisor, lambda: "up" in log.read_text())
    process = child.process
    assert process is not None
    wait = process.wait

    def until_it_has(seconds: float | None = None) -> Any:
        """The grace, which is over when it has started one."""
        if seconds is None:
            return wait()
        monkeypatch.setattr(process, "wait", wait)
        until(lambda: "started" in log.read_text())
        raise subprocess.TimeoutExpired("trainer 0", seconds)

    monkeypatch.setattr(process, "wait", until_it_has)
    supervisor.stop()
    assert not psutil.pid_exists(int(log.read_text().split()[-1]))


def test_a_lease_is_revoked_though_etcd_is_late_once(supervise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = supervise()
    supervisor.add("trainer", 0)
    supervisor.add("trainer", 1)
    tried: list[bool] = [False, True, True]
    monkeypatch.setattr(supervisor._revoker, "try_once", lambda _: tried.pop(0))
    supervisor.stop()
    assert not tried


def test_an_end_goes_on_though_the_name_is_another_runs(
    supervise: Any, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it had events to put, what came after its stop was skipped."""
    supervisor = supervise()
    refused = Mock(side_effect=EtcdUnreachable("no answer", rule="etcd-unreachable", help=""))
    monkeypatch.setattr(supervisor.events.etcd, "put", refused)
    supervisor.add("trainer", 0)
    supervisor.events.emit("died", "an event")
    refused.side_effect = UsageError("the job is another run now", rule="foreign-job", help="")
    supervisor.stop()
    assert refused.call_count > 1
    supervisor.events.again(at_once=True)  # has none left


def test_nothing_is_started_after_stop(supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", 60.0)
    stubs.code = "import sys; sys.exit(1)"
    supervisor = supervise()
    child = supervisor.add("trainer", 0)
    steps(supervisor, lambda: child.restart_at is not None)
    supervisor.stop()
    assert child.restart_at is None
    supervisor.step(0.0)
    assert len(stubs.started) == 1


def test_the_log_of_a_child_that_wrote_none(supervise: Any, tmp_path: Path) -> None:
    assert not os.listdir(tmp_path)
    assert supervise().tail_of_log(Child("trainer", 0)) == ""


def test_a_folder_that_goes_is_told_and_comes_back(
    supervise: Any, stubs: Stubs, etcd: Etcd, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles whose logs cannot be written are no failures; they are started when they can."""
    monkeypatch.setattr(module, "MEASURE_SECONDS", 0.0)
    monkeypatch.setattr(child_module, "ROOM_SECONDS", 0.2)
    (tmp_path / "job.json").touch()
    supervisor = supervise(max_restarts=0)
    child = supervisor.add("pserver", 0)
    supervisor.step(0.0)
    (tmp_path / "job.json").unlink()
    (tmp_path / "logs").rename(tmp_path / "logs away")
    (tmp_path / "logs").write_text("a file")
    first = pid(child)
    assert supervisor.signal("pserver", 0, signal.SIGKILL)
    steps(supervisor, lambda: child.preemptions == 1)
    end = time.monotonic() + 0.6
    steps(supervisor, lambda: time.monotonic() > end)
    assert pid(child) == first, "not started"
    (tmp_path / "logs").unlink()
    steps(supervisor, lambda: pid(child) != first)
    assert (child.failures, supervisor.failed) == (0, "")
    assert f"{tmp_path} is gone, or its file system is: what lives goes on" in "".join(texts(etcd, keys))


def test_who_drives_it_ends_it_before_any_status(supervise: Any, keys: Keys) -> None:
    supervisor = supervise()
    supervisor.look = Mock(side_effect=[None, KeyboardInterrupt])
    supervisor.add("pserver", 0)
    with Etcd(["127.0.0.1:9"], timeout=0.1, deadline=0.1) as away, pytest.raises(KeyboardInterrupt):
        supervise_job(supervisor, away, keys, lambda *_: None, None, True, 0)
