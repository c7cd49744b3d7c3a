"""When a role's daemon block runs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from graphft.runtime.etcd import Etcd, LeaseLost, Session
from graphft.runtime.roles.role import DaemonBlock
from tests.support.waiting import until


def test_it_runs_when_the_lease_is_to_be_renewed_however_long_its_interval_is(etcd: Etcd) -> None:
    """Else the keeper renews, and each of its renewals is told as this process's delay."""
    lost: list[LeaseLost] = []
    with Session(etcd, 60) as session:
        session._due -= 18.0  # in 2 s
        begun = session.page.renewed
        member: Any = SimpleNamespace(
            session=session,
            changed=threading.Event(),
            progress=SimpleNamespace(left=lambda: 600.0),
            events=SimpleNamespace(again=lambda: None),
        )
        block = SimpleNamespace(attrs={"interval": 600.0})
        blocks: Any = SimpleNamespace(
            program=SimpleNamespace(blocks={"daemon": block}),
            ctx=SimpleNamespace(scope=None),
            lowered=lambda _: lambda *_: session.tick(),
        )
        end: Any = SimpleNamespace(closing=threading.Event(), lease_lost=lost.append)
        daemon = DaemonBlock(blocks, member, end)
        daemon.start()
        until(lambda: session.page.renewed > begun or lost)
        end.closing.set()
        daemon.join()
    assert not lost
