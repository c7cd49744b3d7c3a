"""Processes of a job reach each other or not, by made-up registrations."""

from __future__ import annotations

import pytest

from graphft.runtime.coordination.job_view import JobView, out_of_reach
from graphft.runtime.coordination.records import Registration

LOCAL, LAN = "tcp://127.0.0.1:5", "tcp://10.0.0.1:5"


def at(name: str, network: str, address: str = "") -> Registration:
    return Registration(name, address, 7, f"host-{network}", network)


@pytest.mark.parametrize(
    ("me", "pserver", "trainer", "wrong"),
    [
        (at("t", "a"), at("p", "a", LOCAL), None, ""),
        (at("t", "a"), at("p", "b", LAN), None, ""),
        (at("t", "a"), at("p", "b", LOCAL), None, "pserver 0 listens at tcp://127.0.0.1:5 on host-b"),
        (at("p1", "a", LOCAL), at("p", "b", LAN), None, "this process listens at tcp://127.0.0.1:5 on host-a"),
        (at("p1", "a", LOCAL), None, at("t", "b"), "which t on host-b (pid 7) cannot reach"),
        (at("t1", "a"), None, at("t", "b"), ""),
    ],
)
def test_a_pserver_on_loopback_is_reached_on_its_own_network_only(
    me: Registration, pserver: Registration | None, trainer: Registration | None, wrong: str
) -> None:
    view = JobView({0: pserver} if pserver else {}, {"t": trainer} if trainer else {})
    found = out_of_reach(me, view)
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_a_coordinator_listens_too() -> None:
    there = at("c", "b", LOCAL)
    found = out_of_reach(at("t", "a"), JobView(coordinators={"c": there}))
    assert found.startswith("coordinator c listens at tcp://127.0.0.1:5 on host-b")
