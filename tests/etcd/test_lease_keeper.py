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

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, LeaseLost, Session
from graphft.runtime.etcd.lease_keeper import END, RENEW, REST, ROUNDS, LeasePage, decide
from tests.support.waiting import ended, until

TTL = 10


def page_at(started: float = 100.0, ttl: float = 10.0) -> LeasePage:
    page = LeasePage.make()
    page.begin(started, ttl, 0.8)
    return page


# -- the decision -----------------------------------------------------------------------------------------------------


def test_it_renews_when_half_of_the_ttl_has_passed_and_not_after_the_deadline() -> None:
    page = page_at()
    whats = {now: decide(page, 100.0 + now, 0.0, "S")[0] for now in (0.0, 4.9, 5.1, 7.9, 8.0, 20.0)}
    assert whats == {0.0: REST, 4.9: REST, 5.1: RENEW, 7.9: RENEW, 8.0: END, 20.0: END}


def test_it_rests_while_the_role_renews_by_itself() -> None:
    page = page_at()
    for sent in (103.3, 106.6, 109.9):
        page.renew(sent, 10.0)
        assert decide(page, sent + 4.9, 0.0, "R") == (REST, "the lease was renewed a moment ago")
    assert page.live_until() == 109.9 + 8


def test_its_own_renewals_count() -> None:
    page = page_at()
    page.kept_renewed, page.kept_deadline = 105.0, 113.0
    assert decide(page, 109.9, 0.0, "S")[0] == REST
    assert decide(page, 110.1, 0.0, "S")[0] == RENEW
    assert decide(page, 113.0, 0.0, "S")[0] == END


@pytest.mark.parametrize(("state", "what"), [("T", REST), ("t", REST), ("Z", END), ("X", END), ("", END), ("D", RENEW)])
def test_what_the_role_does_counts(state: str, what: str) -> None:
    """A stopped role loses its lease; one that waits for its disk does not."""
    assert decide(page_at(), 106.0, 0.0, state)[0] == what


def test_a_main_thread_over_its_limit_is_not_covered() -> None:
    page = page_at()
    assert decide(page, 106.0, 1e9, "S")[0] == RENEW, "there is no limit before the role says so"
    page.limit = 54.0
    assert decide(page, 106.0, 53.0, "S")[0] == RENEW
    assert decide(page, 106.0, 55.0, "S") == (REST, "the role's main thread is over its limit")


def test_a_daemon_thread_that_hangs_is_not_covered() -> None:
    """The main thread goes round and round, so the lock is free; one that does nothing either may hold it."""
    page = page_at()
    page.look(105.0)
    page.kept_renewed, page.kept_deadline, page.beats = 115.0, 123.0, ROUNDS - 1
    assert decide(page, 121.0, 0.0, "S")[0] == RENEW
    page.beats = ROUNDS
    assert decide(page, 121.0, 0.0, "S")[0] == REST
    page.renew(121.0, 10.0)
    assert decide(page, 127.0, 0.0, "S")[0] == RENEW, "it came back"


def test_marks_before_the_role_was_late_do_not_tell_that_the_lock_is_free() -> None:
    """A main thread that made many fast steps after the last renewal, and holds the lock since."""
    page = page_at()
    page.beats = 10 * ROUNDS
    for now in (103.0, 105.1):
        page.look(now)
    page.kept_renewed, page.kept_deadline = 105.1, 113.1
    assert decide(page, 111.0, 0.0, "S")[0] == RENEW
    page.look(111.0)
    page.beats += ROUNDS
    why = "the role's main thread gets on, and its daemon thread does not renew"
    assert decide(page, 111.0, 0.0, "S") == (REST, why)


def test_a_lease_that_the_role_takes_for_lost_is_not_renewed() -> None:
    page = page_at()
    page.closed = 1
    assert decide(page, 106.0, 0.0, "S")[0] == END


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(etcd: Etcd, request: pytest.FixtureRequest) -> Iterator[Session]:
    """Renewed by a thread, as a role's is by its daemon block, and by a keeper. That one takes the lease for a shorter
    one: it is ready soon and renews early, so that it loses nothing when it gets no processor for seconds."""
    with Session(etcd, getattr(request, "param", TTL)).run_thread() as session:
        session.page.ttl = 2
        session.keep(etcd.urls)
        yield session


def await_end(etcd: Etcd, lease: int) -> None:
    """Till etcd knows it no more. A renewal would prolong it."""

    def gone() -> bool:
        try:
            etcd.put("/of-the-ended", b"", lease)
        except LeaseLost:
            return True
        return False

    until(gone)


def hold_the_lock(seconds: int) -> None:
    """`sleep` of the C library, called without giving the interpreter's lock away."""
    ctypes.PyDLL(None).sleep(seconds)


def test_a_lock_that_is_held_for_longer_than_the_ttl_loses_nothing(session: Session, etcd: Etcd) -> None:
    """No thread of this process could renew."""
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


def test_without_a_keeper_it_is_lost(etcd: Etcd) -> None:
    with Session(etcd, 6).run_thread() as session:
        hold_the_lock(6)
        with pytest.raises(LeaseLost, match="no renewal was answered"):
            session.check()


@pytest.mark.parametrize("session", [60], indirect=True)
def test_a_keeper_that_dies_or_is_stopped_is_replaced(session: Session, etcd: Etcd) -> None:
    """The lease does not depend on it, and its successor does what it did."""
    for number in (signal.SIGKILL, signal.SIGSTOP):
        until(lambda: session.page.ready)
        session.page.ready = 0
        keeper = session.keeper
        os.kill(keeper, number)
        until(lambda keeper=keeper: (session.keep(etcd.urls), session.keeper != keeper)[1])  # type: ignore[misc]
        until(lambda keeper=keeper: ended(keeper))  # type: ignore[misc]
    session.check()
    until(lambda: session.page.ready)
    session.check()


def test_it_ends_with_its_session(session: Session, etcd: Etcd) -> None:
    keeper = session.keeper
    assert psutil.pid_exists(keeper)
    session.close()
    session.keep(etcd.urls)
    until(lambda: ended(keeper))
    assert session.page.closed
    await_end(etcd, session.lease)


@pytest.mark.parametrize("session", [6], indirect=True)
def test_a_lease_that_somebody_revoked_is_over_at_once(session: Session, etcd: Etcd) -> None:
    """The keeper is the first to learn of it, if this process cannot."""
    until(lambda: session.page.seen)
    etcd.lease_revoke(session.lease)
    kept = session.page.kept
    hold_the_lock(6)
    with pytest.raises(LeaseLost):
        session.check()
    assert session.page.kept <= kept + 1, "one that was answered before may be noted after"


ROLE = """
import sys, time
from graphft.runtime.etcd import Etcd, Session
with Etcd([sys.argv[1]], timeout=20, deadline=60) as etcd:
    session = Session(etcd, int(sys.argv[2])).run_thread()
    session.keep(etcd.urls)
    while not session.page.seen:  # it ignores SIGTERM by then
        time.sleep(0.01)
    print(session.lease, session.keeper, flush=True)
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
    """Also when that one is killed, and although SIGTERM alone does not end it."""
    process, _, keeper = role
    os.kill(keeper, signal.SIGTERM)
    time.sleep(0.2)
    assert psutil.pid_exists(keeper)
    os.kill(keeper, signal.SIGSTOP)
    process.kill()
    until(lambda: ended(keeper))


@pytest.mark.parametrize("role", [6], indirect=True)
def test_a_role_that_is_stopped_loses_its_lease(role: tuple[subprocess.Popen[str], int, int], etcd: Etcd) -> None:
    """Its keeper runs on, and does not renew."""
    process, lease, keeper = role
    process.send_signal(signal.SIGSTOP)
    await_end(etcd, lease)
    process.send_signal(signal.SIGCONT)
    until(lambda: ended(keeper))


def test_a_frozen_etcd_ends_the_session_in_time_with_a_keeper_too(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as server, Etcd(server.endpoints, deadline=60) as client, Session(client, 6) as session:
        session.run_thread().keep(client.urls)
        server.pause()
        try:
            hold_the_lock(12)
            assert not session.alive()
        finally:
            server.resume()
        time.sleep(0.5)
        assert not session.alive(), "an answer that comes late revives nothing"
