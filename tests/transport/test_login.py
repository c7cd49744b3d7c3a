"""A peer that does not know the run's secret sends nothing: ZeroMQ itself asks for it, at the handshake."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import pytest
import zmq
from transport.rigs import LIMITS, WAIT, collect

from graphft.runtime.protocol.messages import Hello, Push, Query, Welcome, encode
from graphft.runtime.transport import Login, ZmqClient, ZmqServer
from graphft.runtime.transport.port import Limits
from tests.support.waiting import until

LOGIN = Login("run-1", "secret of the run")
WELCOME = Welcome(shard=0, incarnation="i", generation=1, version=2)


@pytest.fixture
def server() -> Iterator[ZmqServer]:
    server = ZmqServer(LIMITS, LOGIN)
    server.address = server.bind()  # type: ignore[attr-defined]
    yield server
    server.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_who_knows_the_words_is_heard_and_answered(server: ZmqServer) -> None:
    client = ZmqClient("t0", LIMITS, LOGIN)
    client.connect(0, server.address)  # type: ignore[attr-defined]
    client.send(0, Query())
    (got,) = collect(server, 1)
    server.send(got.peer, WELCOME, b"frame")
    reply = client.receive(WAIT)
    assert reply is not None
    assert (reply.message, bytes(reply.frame or b"")) == (WELCOME, b"frame")
    assert not server.counters["refused.login"]
    client.close()


WORDS = {
    "none": None,
    "another secret": (b"run-1", b"secret of the ru"),
    "another run": (b"run-2", LOGIN.secret.encode()),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_who_does_not_is_not_even_read(
    server: ZmqServer, context: zmq.Context, words: tuple[bytes, bytes] | None
) -> None:
    before = psutil.Process().memory_info().rss
    with context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        if words is not None:
            stranger.plain_username, stranger.plain_password = words
        stranger.connect(server.address)  # type: ignore[attr-defined]
        stranger.sndtimeo = 500
        part = bytes(LIMITS.max_frame)
        with contextlib.suppress(zmq.Again):  # its connection may be refused already: then it has nowhere to send to
            stranger.send_multipart([encode(Hello("run-1", LOGIN.secret, "t0"))])
            for _ in range(2):
                stranger.send_multipart([encode(Push(0, 0, 0, 0, 1, True)), *[part] * 32], copy=False)
        assert server.poll(0.5) == []
        until(lambda: server.poll(0.01) or server.counters["refused.login"] >= (words is not None))
        assert stranger.poll(100) == 0
    assert psutil.Process().memory_info().rss - before < 16 << 20
    assert not [name for name in server.counters if name.startswith("received")]
    assert server.counters["refused.login"] == (words is not None)


def test_a_server_that_asks_nobody_is_told_nothing(context: zmq.Context) -> None:
    with context.socket(zmq.ROUTER) as listener:
        listener.linger = 0
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        client = ZmqClient("t0", LIMITS, LOGIN)
        client.connect(0, f"tcp://127.0.0.1:{port}")
        client.send(0, Query())
        assert listener.poll(300) == 0
        client.close()


def test_no_text_shows_the_secret() -> None:
    assert LOGIN.secret not in repr(LOGIN)
    assert LOGIN.secret not in repr(Hello("run-1", LOGIN.secret, "t0"))


def test_a_part_larger_than_any_bucket_ends_the_connection_of_its_sender() -> None:
    server = ZmqServer(Limits(max_frame=1000, max_header=500), LOGIN)
    client, other = (ZmqClient(name, Limits(), LOGIN) for name in ("faulty", "t0"))
    address = server.bind()
    for peer in (client, other):
        peer.connect(0, address)
    client.send(0, Query(), bytes(1 << 20))
    other.send(0, Query())
    assert [g.peer[:2] for g in collect(server, 1)] == [b"t0"]
    for transport in (client, other, server):
        transport.close()


def test_what_a_peer_makes_a_server_queue_has_a_bound() -> None:
    server = ZmqServer(Limits(max_queued=50))
    context = zmq.Context()
    with context.socket(zmq.DEALER) as reader:
        reader.linger, reader.rcvhwm = 0, 1
        reader.connect(server.bind())
        reader.send(encode(Query()))
        (got,) = collect(server, 1)
        for _ in range(200):
            server.send(got.peer, WELCOME, bytes(1 << 20))
        assert server.counters["sent"] < 150
        assert server.counters["unroutable"] > 50
    context.destroy(linger=0)
    server.close()
