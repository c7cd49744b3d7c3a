"""A suite for every engine: `check` is called by the tests of each, with an engine of its own that is prepared."""

from __future__ import annotations

import signal
import subprocess
import threading
from typing import Any

import pytest

from graphft.runtime.engines.base import Engine, Order
from tests.support.waiting import until

SILENT = "127.0.0.1:1"
"""An etcd that never answers: a role waits for it for a minute."""
NOWHERE = "not:an:endpoint"
"""A role that is to use it ends at once, with status 2."""
PATIENCE = 240.0


def check(engine: Engine, closes: bool = True) -> None:
    """Starts some processes, and ends them in every way. `engine` is of a run whose job is saved. `closes`: whether its
    end is that of its processes, which those of a launch do not wait for."""
    refused = started(engine, Order("trainer", 7, NOWHERE))
    assert refused.wait(PATIENCE) == 2
    assert refused.poll() == 2
    until(lambda: any("not an etcd endpoint" in line for line in engine.logs(Order("trainer", 7, NOWHERE), 30)), 60)
    killed, left = (started(engine, Order("pserver", i, SILENT)) for i in range(2))
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.05)
    assert killed.await_made() == killed.identity
    until(lambda: killed.pid and left.pid, PATIENCE)
    assert {(p.role, p.index) for p in engine.list()} == {("pserver", 0), ("pserver", 1)}
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(PATIENCE) == -signal.SIGKILL
    assert left.poll() is None
    left.send_signal(signal.SIGTERM)
    assert left.wait(PATIENCE) in (-signal.SIGTERM, 0, 75)
    until(lambda: not engine.list(), 60)
    last = started(engine, Order("pserver", 0, SILENT))
    until(lambda: last.pid, PATIENCE)
    engine.step()
    engine.cancel_orders()
    engine.close()
    if not closes:
        last.send_signal(signal.SIGTERM)
    assert last.wait(PATIENCE) != 0


def started(engine: Engine, order: Order) -> Any:
    """Somebody waits for the process without a limit, as in the supervisor."""
    process = engine.start(order)
    threading.Thread(target=process.wait, daemon=True).start()
    return process
