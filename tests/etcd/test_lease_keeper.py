"""The process that renews a role's lease while the role cannot: when it does, when it must not, and how it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from graphft.runtime.etcd import Etcd, Session
from graphft.runtime.etcd.lease_keeper import END, RENEW, REST, ROUNDS, LeasePage, decide
from tests.support.waiting import ended, until

TTL = 10


def page_at(started: float = 100.0, ttl: float = 10.0) -> LeasePage:
    page = LeasePage.make()
    page.begin(started, ttl)
    return page


# -- the decision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "idle", "state", "changes", "what"),
    [
        (104.9, 0.0, "S", {}, REST),
        (105.1, 0.0, "S", {}, RENEW),
        (107.9, 0.0, "S", {}, RENEW),
        (108.0, 0.0, "S", {}, END),  # the deadline
        (109.9, 0.0, "S", {"kept_renewed": 105.0, "kept_deadline": 113.0}, REST),  # its own renewals count
        (110.1, 0.0, "S", {"kept_renewed": 105.0, "kept_deadline": 113.0}, RENEW),
        (113.0, 0.0, "S", {"kept_renewed": 105.0, "kept_deadline": 113.0}, END),
        (106.0, 0.0, "T", {}, REST),  # a stopped role loses its lease, ...
        (106.0, 0.0, "t", {}, REST),
        (106.0, 0.0, "D", {}, RENEW),  # ... one that waits for its disk does not
        *((106.0, 0.0, gone, {}, END) for gone in ("Z", "X", "")),
        (106.0, 1e9, "S", {}, RENEW),  # there is no limit before the role says so
        (106.0, 53.0, "S", {"limit": 54.0}, RENEW),
        (106.0, 55.0, "S", {"limit": 54.0}, REST),
        (106.0, 0.0, "S", {"closed": 1}, END),  # the role takes it for lost
    ],
)
def test_it_renews_what_is_late_and_works(
    now: float, idle: float, state: str, changes: dict[str, float], what: str
) -> None:
    page = page_at()
    for name, value in changes.items():
        setattr(page, name, value)
    assert decide(page, now, idle, state)[0] == what


def test_a_daemon_thread_that_hangs_is_not_covered() -> None:
    page = page_at()
    page.look(105.0)
    page.kept_renewed, page.kept_deadline, page.beats = 115.0, 123.0, ROUNDS - 1
    assert decide(page, 121.0, 0.0, "S")[0] == RENEW
    page.beats = ROUNDS
    assert decide(page, 121.0, 0.0, "S")[0] == REST
    page.renew(121.0, 10.0)
    assert decide(page, 127.0, 0.0, "S")[0] == RENEW, "it came back"


def test_marks_before_the_role_was_late_do_not_tell_that_the_lock_is_free() -> None:
    page = page_at()
    page.beats = 10 * ROUNDS
    for now in (103.0, 105.1):
        page.look(now)
    page.kept_renewed, page.kept_deadline = 105.1, 113.1
    assert decide(page, 111.0, 0.0, "S")[0] == RENEW
    page.look(111.0)
    page.beats += ROUNDS
    assert decide(page, 111.0, 0.0, "S")[0] == REST


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(etcd: Etcd, request: pytest.FixtureRequest) -> Iterator[Session]:
    """Renewed by a thread, as a role's is by its daemon block, and by a keeper. That one takes the lease for a shorter
    one: it is ready soon and renews early, so that it loses nothing when it gets no processor for seconds."""
    with Session(etcd, getattr(request, "param", TTL)).run_thread() as session:
        session.page.ttl = 2
        session.keep(etcd.urls)
        yield session


def keeper_of(session: Session) -> int:
    assert session._keeper is not None
    assert session._keeper.process is not None
    return session._keeper.process.pid


def hold_the_lock(seconds: int) -> None:
    """`sleep` of the C library, called without giving the interpreter's lock away."""
    ctypes.PyDLL(None).sleep(seconds)


@pytest.mark.slow
def test_a_lock_that_is_held_for_longer_than_the_ttl_loses_nothing(session: Session, etcd: Etcd) -> None:
    etcd.put("/mine", b"", session.lease)
    until(lambda: session.page.ready)
    kept = session.page.kept
    hold_the_lock(TTL + 1)
    assert session.alive()
    assert session.page.kept > kept
    assert etcd.get("/mine") is not None
    session.page.ttl = TTL  # again: the thread renews first
    until(lambda: session.page.renewed > session.page.kept_renewed)
    session.check()


@pytest.mark.slow
@pytest.mark.parametrize("session", [60], indirect=True)
def test_a_keeper_that_dies_or_is_stopped_is_replaced(session: Session, etcd: Etcd) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        until(lambda: session.page.ready)
        session.page.ready = 0
        keeper = keeper_of(session)
        os.kill(keeper, number)
        until(lambda keeper=keeper: (session.keep(etcd.urls), keeper_of(session) != keeper)[1])  # type: ignore[misc]
        until(lambda keeper=keeper: ended(keeper))  # type: ignore[misc]
    session.check()
    until(lambda: session.page.ready)
    session.check()


ROLE = """
import sys, time
from graphft.runtime.etcd import Etcd, Session
with Etcd([sys.argv[1]], timeout=20, deadline=60) as etcd:
    session = Session(etcd, int(sys.argv[2])).run_thread()
    session.keep(etcd.urls)
    while not session.page.seen:  # it ignores SIGTERM by then
        time.sleep(0.01)
    print(session.lease, session._keeper.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def role(etcd: Etcd, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A process with a lease: (process, lease, keeper)."""
    arguments = [sys.executable, "-c", ROLE, etcd.endpoints[0], str(getattr(request, "param", 60))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        lease, keeper = map(int, process.stdout.readline().split())
        yield process, lease, keeper
        process.kill()


def test_it_ends_with_its_role(role: tuple[subprocess.Popen[str], int, int]) -> None:
    process, _, keeper = role
    os.kill(keeper, signal.SIGTERM)
    time.sleep(0.2)
    assert psutil.pid_exists(keeper)
    os.kill(keeper, signal.SIGSTOP)
    process.kill()
    until(lambda: ended(keeper))
