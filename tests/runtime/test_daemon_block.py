"""When a role's daemon block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from graphft.runtime.etcd import Etcd, LeaseLost, Session
from graphft.runtime.process.role_process import EXIT_FAILED
from graphft.runtime.roles.role import DaemonBlock
from tests.support.waiting import until


def daemon_of(session: Session, lost: list[object], run: Callable[[], object]) -> DaemonBlock:
    member: Any = SimpleNamespace(
        session=session,
        changed=threading.Event(),
        progress=SimpleNamespace(left=lambda: 600.0),
        events=SimpleNamespace(again=lambda: None),
    )
    blocks: Any = SimpleNamespace(
        program=SimpleNamespace(blocks={"daemon": SimpleNamespace(attrs={"interval": 600.0})}),
        ctx=SimpleNamespace(scope=None),
        lowered=lambda _: lambda *_: run(),
    )
    closing = threading.Event()

    def ended(why: object) -> None:
        lost.append(why)
        closing.set()

    end: Any = SimpleNamespace(closing=closing, lease_lost=ended, now=ended)
    return DaemonBlock(blocks, member, end)


def test_it_runs_when_the_lease_is_to_be_renewed_however_long_its_interval_is(etcd: Etcd) -> None:
    lost: list[object] = []
    with Session(etcd, 60) as session:
        session._due -= 18.0  # in 2 s
        begun = session.page.renewed
        daemon = daemon_of(session, lost, session.tick)
        daemon.start()
        until(lambda: session.page.renewed > begun or lost)
        daemon.end.closing.set()
        daemon.join()
    assert not lost


def test_a_process_whose_daemon_block_fails_or_whose_lease_is_lost_ends(etcd: Etcd) -> None:
    lost: list[object] = []
    with Session(etcd, 60) as session:
        for run in (session.tick, dict[str, object]().popitem):
            etcd.lease_revoke(session.lease)
            session._due = 0.0
            daemon = daemon_of(session, lost, run)
            daemon.start()
            daemon.join()
    assert isinstance(lost[0], LeaseLost)
    assert lost[1:] == [EXIT_FAILED]
