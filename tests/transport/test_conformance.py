"""Every driver of the transport, ZeroMQ and the simulated one, does the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from transport.rigs import LIMITS, RIGS, WAIT, Rig, collect

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import Parameters, Push, Query, Refused, Welcome, encode
from graphft.runtime.transport import KeyPair
from graphft.runtime.transport.address import with_key
from graphft.runtime.transport.port import ClientTransport, ServerTransport

WELCOME = Welcome(shard=0, incarnation="i", generation=1, version=2)
DEAD = with_key("tcp://127.0.0.1:9", KeyPair().public)
LARGE = 300_000  # bytes: above the size that is copied
TOO_LARGE = bytes(LIMITS.max_frame + 1)


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = RIGS[request.param]()
    yield rig
    rig.close()


def push(step: int = 0, bucket: int = 0) -> Push:
    return Push(generation=0, step=step, slot=0, bucket=bucket, samples=1, want=True)


def connected(rig: Rig, identity: str = "t0") -> tuple[ServerTransport, ClientTransport, str]:
    server = rig.server()
    address = server.bind()
    client = rig.client(identity)
    client.connect(0, address)
    meet(server, client)
    return server, client, address


def meet(server: ServerTransport, client: ClientTransport) -> None:
    """The client is answered: only then it sends large frames."""
    client.send(0, Query())
    (got,) = collect(server, 1)
    server.send(got.peer, WELCOME)
    assert client.receive(WAIT) is not None
    for counters in (client.counters, server.counters):
        counters.clear()


@pytest.mark.parametrize("size", [None, 0, 1, 1000, LARGE, LIMITS.max_frame])
def test_request_and_answer_carry_headers_and_frames(rig: Rig, size: int | None) -> None:
    server, client, _ = connected(rig)
    frame = None if size is None else os.urandom(size)
    client.send(0, push(step=7), frame)
    (got,) = collect(server, 1)
    assert got.message == push(step=7)
    assert (got.frame is None) == (frame is None)
    assert frame is None or bytes(got.frame or b"") == frame
    server.send(got.peer, Parameters(generation=0, version=8, bucket=0), got.frame)
    reply = client.receive(WAIT)
    assert reply is not None
    assert (reply.shard, reply.message) == (0, Parameters(generation=0, version=8, bucket=0))
    assert frame is None or bytes(reply.frame or b"") == frame
    assert client.counters["sent_bytes"] == server.counters["received_bytes"] == (size or 0)


def test_hundreds_of_queued_messages_arrive_once_and_in_order(rig: Rig) -> None:
    server, client, _ = connected(rig)
    for i in range(500):
        client.send(0, push(step=i), bytes([i % 251]) * (1 + 700 * (i % 100)))
    got = collect(server, 500)
    assert [g.message.step for g in got] == list(range(500))
    assert all(bytes(g.frame) == bytes([i % 251]) * (1 + 700 * (i % 100)) for i, g in enumerate(got))
    assert server.poll(0) == []


def test_answers_reach_the_peer_that_asked(rig: Rig) -> None:
    servers = [rig.server() for _ in range(2)]
    addresses = [s.bind() for s in servers]
    clients = [rig.client(f"t{i}") for i in range(3)]
    for i, client in enumerate(clients):
        for shard, address in enumerate(addresses):
            client.connect(shard, address)
            client.send(shard, push(step=i, bucket=shard))
    for shard, server in enumerate(servers):
        got = collect(server, 3)
        assert len({g.peer for g in got}) == 3
        for g in got:
            server.send(g.peer, Parameters(generation=0, version=g.message.step, bucket=shard))
    for i, client in enumerate(clients):
        replies = [client.receive(WAIT) for _ in servers]
        assert sorted((r.shard, r.message.version, r.message.bucket) for r in replies if r) == [(0, i, 0), (1, i, 1)]


def test_a_new_incarnation_gets_nothing_of_what_was_queued_for_the_old_one(rig: Rig) -> None:
    client = rig.client()
    client.connect(0, DEAD)
    lost = [client.send(0, push(step=i), bytes(LARGE * (i % 2))) for i in range(20)]
    server = rig.server()
    client.connect(0, server.bind())
    client.send(0, Query())
    assert [g.message for g in collect(server, 1)] == [Query()]
    assert server.poll(0.1) == []
    assert all(sent.wait(120) for sent in lost)


def test_answers_of_an_earlier_connection_are_dropped(rig: Rig) -> None:
    server, client, address = connected(rig)
    client.send(0, Query())
    (got,) = collect(server, 1)
    server.send(got.peer, WELCOME)
    client.send(0, Query())  # the answer above has arrived when the one to this has
    assert client.receive(WAIT) is not None
    (again,) = collect(server, 1)
    server.send(again.peer, WELCOME)
    client.connect(0, address)
    assert client.receive(0.2) is None
    client.send(0, Query())
    (fresh,) = collect(server, 1)
    assert fresh.peer != got.peer
    server.send(fresh.peer, WELCOME)
    assert client.receive(WAIT) is not None


def test_an_answer_to_a_peer_that_is_gone_is_counted_and_dropped(rig: Rig) -> None:
    server, client, _ = connected(rig)
    client.send(0, Query())
    (got,) = collect(server, 1)
    client.disconnect(0)
    end = time.monotonic() + 120
    while not server.counters["unroutable"] and time.monotonic() < end:  # it has not noticed
        server.poll(0.05)
        sent = server.send(got.peer, WELCOME, bytes(LARGE))
    assert server.counters["unroutable"] == 1
    assert sent.done
    assert server.send(b"nobody", WELCOME, bytes(LARGE)).done
    assert client.send(3, push(), bytes(LARGE)).done
    assert (server.counters["unroutable"], client.counters["unroutable"]) == (2, 1)


def test_a_frame_may_change_once_it_is_done(rig: Rig) -> None:
    server, client, _ = connected(rig)
    frame = bytearray(b"a" * LARGE)
    sent = client.send(0, push(), frame)
    assert sent.wait(120)
    assert sent.done
    frame[:] = b"b" * LARGE
    assert bytes(collect(server, 1)[0].frame or b"") == b"a" * LARGE


def test_a_small_frame_may_change_at_once(rig: Rig) -> None:
    server, client, _ = connected(rig)
    frame = bytearray(b"a" * 1000)
    assert client.send(0, push(), frame).done
    frame[:] = b"b" * 1000
    assert bytes(collect(server, 1)[0].frame or b"") == b"a" * 1000


def test_wake_ends_one_wait(rig: Rig) -> None:
    server, client, _ = connected(rig)
    server.wake()
    server.wake()
    assert server.poll(None) == []
    assert server.poll(0.01) == []
    client.wake()
    assert client.receive(None) is None
    client.send(0, Query())
    assert [g.message for g in server.poll(WAIT)] == [Query()]


MALFORMED = {
    "parts": [encode(Query()), b"", b""],
    "header-size": [bytes(LIMITS.max_header + 1)],
    "frame-size": [encode(push()), bytes(LIMITS.max_frame + 1)],
    "undecodable": [b"\xff\x00junk"],
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_a_malformed_message_is_refused_counted_and_answered(rig: Rig, reason: str) -> None:
    server, client, address = connected(rig)
    answer = rig.exchange_raw(address, MALFORMED[reason], server)
    assert isinstance(answer, Refused)
    assert answer.code == "malformed"
    assert {k: v for k, v in server.counters.items() if k.startswith("refus")} == {f"refused.{reason}": 1}
    client.send(0, Query())
    assert [g.message for g in collect(server, 1)] == [Query()]


def test_a_frame_that_no_receiver_takes_is_an_error_of_the_sender(rig: Rig) -> None:
    server, client, _ = connected(rig)
    for send in (lambda: client.send(0, push(), TOO_LARGE), lambda: server.send(b"t0", WELCOME, TOO_LARGE)):
        with pytest.raises(GraphftError, match=r"^error\[frame-size\]"):
            send()
    client.send(0, Query())
    assert [g.message for g in collect(server, 1)] == [Query()]


def test_a_busy_port_is_named(rig: Rig) -> None:
    port = int(rig.server().bind().rpartition(":")[2])
    with pytest.raises(GraphftError, match=r"^error\[port-in-use\]"):
        rig.server().bind(port=port)


@pytest.mark.parametrize("address", ["", "127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://h:99999", "ipc:///x"])
def test_what_is_no_address_is_refused_at_once(rig: Rig, address: str) -> None:
    with pytest.raises(GraphftError, match=r"^error\[address\]"):
        rig.client().connect(0, address)


def test_closing_twice_is_fine_and_ends_the_use(rig: Rig) -> None:
    server, client, _ = connected(rig)
    for _ in range(2):
        client.close()
        server.close()
    server.wake()
    client.wake()
    for use in (lambda: client.send(0, Query()), lambda: client.receive(1), lambda: client.connect(0, DEAD)):
        with pytest.raises(GraphftError, match=r"^error\[transport\]"):
            use()
