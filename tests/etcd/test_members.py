"""Members of a cluster that come and go: a client that follows them, and one that does not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError, EtcdUnreachable
from graphft.runtime.etcd.calls import FOLLOW_SECONDS
from graphft.runtime.etcd.embedded import HOST, free_ports
from graphft.runtime.etcd.open import FOLLOW, open_etcd
from tests.support.waiting import until


class Members:
    """A cluster that begins as one member, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all = [self._new("first").start()]
        self.admin = Etcd(self.all[0].endpoints, deadline=60)
        self._peers = {m.name: m.peer_urls[0] for m in self.admin.members()}
        """A member that is asked later may not have heard of the newest, or not of its name."""

    def join(self, name: str) -> EmbeddedEtcd:
        ports = free_ports(2)
        url = f"http://{HOST}:{ports[1]}"
        self._changed(lambda: self.admin.member_add(url), lambda: any(url in m.peer_urls for m in self.admin.members()))
        self._peers[name] = url
        cluster = ",".join(f"{name}={url}" for name, url in self._peers.items())
        member = self._new(name, ports=(ports[0], ports[1]), cluster=cluster, state="existing")
        self.all.append(member.start())
        self.admin.move([endpoint for each in self.all for endpoint in each.endpoints])
        return member

    def lose(self, member: EmbeddedEtcd) -> None:
        member.kill()
        self.all.remove(member)
        self.admin.move([endpoint for each in self.all for endpoint in each.endpoints])
        number = next(m.id for m in self.admin.members() if self._peers[member.name] in m.peer_urls)
        self._changed(
            lambda: self.admin.member_remove(number), lambda: all(m.id != number for m in self.admin.members())
        )
        del self._peers[member.name]

    def close(self) -> None:
        self.admin.close()
        for member in self.all:
            member.kill()

    def _new(self, name: str, **of_cluster: object) -> EmbeddedEtcd:
        return EmbeddedEtcd(self.folder / name, name=name, heartbeat=50, election=500, **of_cluster)  # type: ignore

    def _changed(self, change: Callable[[], object], is_so: Callable[[], bool]) -> None:
        """etcd takes a change when all members have been connected for a while; once, however late it answers."""
        end = time.monotonic() + 120
        while True:
            try:
                change()
                return
            except EtcdError:
                with contextlib.suppress(EtcdError):
                    if is_so():
                        return
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    cluster = Members(tmp_path)
    yield cluster
    cluster.close()


def test_a_client_that_follows_survives_the_loss_of_every_member_it_was_given(members: Members) -> None:
    first = members.all[0]
    with open_etcd(first.endpoints, {FOLLOW: "1"}) as follower, Etcd(first.endpoints, deadline=60) as other:
        follower.put("key", b"1", deadline=60)
        other.put("key", b"2")
        second, third = members.join("second"), members.join("third")
        given = {*second.endpoints, *third.endpoints}
        end = time.monotonic() + 120
        while not given <= set(follower.endpoints) and time.monotonic() < end:
            time.sleep(0.1)
            follower.get("key", deadline=60)
        members.lose(first)
        kv = follower.get("key", deadline=120)
        assert kv is not None
        assert kv.value == b"2"
        assert other.endpoints == tuple(first.endpoints)
        with pytest.raises(EtcdUnreachable):
            other.get("key", deadline=1)
        members.join("fourth")
        members.lose(second)
        follower.put("key", b"3", deadline=120)
        kv = members.admin.get("key", deadline=120)
        assert kv is not None
        assert kv.value == b"3"


def test_a_client_that_is_moved_asks_the_other_etcd(members: Members, tmp_path: Path) -> None:
    with (
        EmbeddedEtcd(tmp_path / "other") as other,
        Etcd(members.all[0].endpoints, deadline=60) as client,
        Etcd(other.endpoints, deadline=60) as its,
    ):
        client.put("key", b"here")
        its.put("key", b"there")
        client.move(other.endpoints)
        kv = client.get("key")
        assert kv is not None
        assert kv.value == b"there"
        assert client.endpoints == tuple(other.endpoints)


def test_etcd_answers_while_a_second_member_joins_as_a_learner(members: Members) -> None:
    """A second member with a vote would be needed for every write, before it is even started."""
    first, admin, ports = members.all[0], members.admin, free_ports(2)
    url = f"http://{HOST}:{ports[1]}"
    number = admin.member_add(url, learner=True, deadline=60)
    assert [m.learner for m in admin.members() if m.id == number] == [True]
    admin.put("key", b"1")
    with pytest.raises(EtcdError):  # it has no data
        admin.member_promote(number)
    admin.put("key", b"2")
    (peer,) = [m.peer_urls[0] for m in admin.members() if m.id != number]
    cluster = f"first={peer},second={url}"
    second = members._new("second", ports=(ports[0], ports[1]), cluster=cluster, state="existing")
    members.all.append(second)
    second.launch()
    with open_etcd(first.endpoints, {FOLLOW: "1"}) as follower:
        until(lambda: any(m.name == "second" for m in admin.members()))
        time.sleep(FOLLOW_SECONDS)
        follower.put("key", b"3", deadline=60)
        assert follower.endpoints == tuple(first.endpoints), "a learner answers no client"
        members._changed(
            lambda: admin.member_promote(number), lambda: [m.learner for m in admin.members()] == [False, False]
        )
        assert [m.learner for m in admin.members()] == [False, False]
        second.await_healthy()
        until(lambda: follower.get("key", deadline=60) and len(follower.endpoints) == 2)
        with Etcd(second.endpoints, deadline=60) as its:
            kv = its.get("key")
            assert kv is not None
            assert kv.value == b"3"


def test_a_call_in_progress_goes_on_with_the_members_that_are_asked_by_then(members: Members) -> None:
    """Not with those that were asked when it began, nor on their channel, which is closed after the second move."""
    here = members.all[0].endpoints
    members.admin.put("key", b"1")
    dead = [f"{HOST}:{port}" for port in free_ports(2)]
    with Etcd(dead[:1]) as client:
        found: list[object] = []

        def get() -> None:
            try:
                found.append(client.get("key", deadline=120))
            except Exception as error:
                found.append(error)

        asking = threading.Thread(target=get)
        asking.start()
        for endpoints in (dead[1:], here):
            time.sleep(0.5)
            client.move(endpoints)
        asking.join(120)
        assert [getattr(kv, "value", kv) for kv in found] == [b"1"]


def test_a_move_to_names_that_are_not_known_yet_changes_nothing(members: Members) -> None:
    """It is made again later, and not taken for one that has been made."""
    here = tuple(members.all[0].endpoints)
    with Etcd(here, deadline=60) as client:
        client.put("key", b"1")
        for _ in range(2):
            with pytest.raises(EtcdUnreachable):
                client.move(["one.invalid:2379", "two.invalid:2379"])
            assert client.endpoints == here
        kv = client.get("key")
        assert kv is not None
        assert kv.value == b"1"


def test_a_member_that_is_not_there_is_not_removed(members: Members) -> None:
    with pytest.raises(EtcdError, match="MemberRemoveRequest"):
        members.admin.member_remove(4711)
