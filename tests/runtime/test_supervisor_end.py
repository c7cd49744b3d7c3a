"""A supervisor ends, and leaves nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import child as child_module
from graphft.runtime.launcher.supervise import supervise as supervise_job
from tests.runtime.stubs import SLEEP, Stubs, steps


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


def test_who_drives_it_ends_it_before_any_status(supervise: Any) -> None:
    supervisor = supervise()
    supervisor.look = Mock(side_effect=[None, KeyboardInterrupt])
    supervisor.add("pserver", 0)
    with Etcd(["127.0.0.1:9"], timeout=0.1, deadline=0.1) as supervisor.etcd, pytest.raises(KeyboardInterrupt):
        supervise_job(supervisor, lambda _: None)
