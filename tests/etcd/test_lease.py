"""A session stops trusting its lease before etcd ends it, whatever fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.runtime.etcd import EtcdUnreachable, LeaseLost, Session
from tests.sim.etcd_store import SimEtcd


class World(SimEtcd):
    """A simulated store with a settable clock, to which the way can be lost."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.away = False
        self.delay = 0.0
        super().__init__(clock=self.time)

    def time(self) -> float:
        return self.now

    def lease_keepalive_once(self, lease: int, *, deadline: float | None = None) -> int:
        if self.away:
            self.now += deadline or 0.0
            raise EtcdUnreachable("away")
        ttl = super().lease_keepalive_once(lease)
        self.now += self.delay  # the answer's way back
        return ttl

    def session(self, ttl: int = 10) -> Session:
        return Session(self, ttl, clock=self.time)


def test_a_dead_refresher_is_noticed_before_the_server_ends_the_lease_and_it_stays_lost() -> None:
    world = World()
    session = world.session()
    world.put("/mine", b"", session.lease)
    world.now += 7.9
    session.check()
    world.now += 0.2
    with pytest.raises(LeaseLost, match="no renewal was answered"):
        session.check()
    assert world.get("/mine") is not None
    with pytest.raises(LeaseLost):
        session.tick()  # etcd would still renew it
    assert session.remaining() == 0
    assert world.lease_keepalive_once(session.lease) == 10


def test_ticks_outlast_an_etcd_that_is_away_for_a_while() -> None:
    world = World()
    session = world.session()
    world.now += 4
    world.away = True
    pause = session.tick()
    assert 0 < pause <= 1
    world.now += pause
    world.away = False
    session.tick()
    assert session.remaining() == pytest.approx(8)
    world.lease_revoke(session.lease)
    world.now += 4
    with pytest.raises(LeaseLost, match="expired"):
        session.tick()
    session.close()


steps = st.lists(
    st.tuples(
        st.floats(0, 4),  # time passes
        st.booleans(),  # the way is lost
        st.floats(0, 3),  # how long an answer takes
        st.booleans(),  # whether the refresher runs
        st.booleans(),  # whether somebody looks
    ),
    max_size=40,
)


@given(steps)
def test_whoever_is_alive_has_a_lease(steps: list[tuple[float, bool, float, bool, bool]]) -> None:
    world = World()
    session = world.session()
    world.put("/mine", b"", session.lease)
    lost = False
    for passes, away, delay, runs, looks in steps:
        world.now += passes
        world.away, world.delay = away, delay
        if runs:
            try:
                session.tick()
            except LeaseLost:
                lost = True
        if looks and session.alive():
            assert not lost
            assert world.get("/mine") is not None
