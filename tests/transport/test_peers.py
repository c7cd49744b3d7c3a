"""Peers that die, freeze, come back, or talk nonsense: real processes, real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from transport.rigs import WAIT, collect

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import Parameters, Push, Query, Welcome, encode
from graphft.runtime.transport.port import Limits, Reply
from graphft.runtime.transport.zeromq import ZmqClient, ZmqServer
from tests.support.proxy import Proxy
from tests.support.waiting import until


@pytest.fixture
def client() -> Iterator[ZmqClient]:
    client = ZmqClient("t0")
    yield client
    client.close()


def push(step: int) -> Push:
    return Push(generation=0, step=step, slot=0, bucket=0, samples=1, want=True)


def receive(client: ZmqClient) -> Reply:
    reply = client.receive(WAIT)
    assert reply is not None
    return reply


def test_a_server_that_does_not_answer_any_more_is_noticed_and_found_again() -> None:
    client, server = ZmqClient("t0", Limits(heartbeat=0.1, heartbeat_timeout=0.4)), ZmqServer()
    with Proxy(server.bind().removeprefix("tcp://")) as proxy:
        client.connect(0, f"tcp://{proxy.endpoint}")
        client.send(0, Query())
        collect(server, 1)
        proxy.drop_requests = proxy.drop_replies = True
        lost = client.send(0, push(2), bytes(32 << 20))
        assert lost.wait(120), "giving up the connection gives it back"
        proxy.heal()

        def heard() -> bool:
            client.send(0, push(3))
            return any(got.message == push(3) for got in server.poll(1))

        until(heard)
    client.close()
    server.close()


def test_a_client_counts_and_drops_malformed_answers(client: ZmqClient) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as shard:
        shard.linger = 0
        port = shard.bind_to_random_port("tcp://127.0.0.1")
        client.connect(0, f"tcp://127.0.0.1:{port}")
        client.send(0, Query())
        peer, _ = shard.recv_multipart()
        for parts in (
            [b"junk"],
            [b""],
            [encode(Query()), b"", b""],
            [encode(Welcome(shard=0, incarnation="x", generation=0, version=0))],
        ):
            shard.send_multipart([peer, *parts])
        assert receive(client).message == Welcome(shard=0, incarnation="x", generation=0, version=0)
        assert client.counters["refused.undecodable"] == 2
        assert client.counters["refused.parts"] == 1


def test_close_ends_a_wait_in_another_thread(client: ZmqClient) -> None:
    errors: list[str] = []

    def wait() -> None:
        try:
            client.receive(None)
        except GraphftError as e:
            errors.append(e.rule)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    client.close()
    thread.join(120)
    assert errors == ["transport"]


def test_many_threads_may_send(client: ZmqClient) -> None:
    server = ZmqServer()
    client.connect(0, server.bind())
    threads = [
        threading.Thread(target=lambda t=t: [client.send(0, push(100 * t + i), bytes(80_000)) for i in range(100)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    steps = [g.message.step for g in collect(server, 400)]
    for thread in threads:
        thread.join()
    assert sorted(steps) == list(range(400))
    assert all([s for s in steps if s // 100 == t] == list(range(100 * t, 100 * t + 100)) for t in range(4))
    server.close()


def test_a_thread_that_waits_misses_nothing_while_another_sends(client: ZmqClient) -> None:
    server = ZmqServer()
    client.connect(0, server.bind())
    count = 3000
    versions: list[int] = []

    def serve() -> None:
        answered = 0
        while answered < count:
            for peer, message, _ in server.poll(10):
                server.send(peer, Parameters(generation=0, version=message.step, bucket=0))
                answered += 1

    threads = [
        threading.Thread(target=serve),
        threading.Thread(target=lambda: versions.extend(receive(client).message.version for _ in range(count))),
    ]
    for thread in threads:
        thread.start()
    for step in range(count):
        client.send(0, push(step))
        if step % 7 == 0:
            time.sleep(0)  # lets the others catch up, so that both often wait
    for thread in threads:
        thread.join(120)
    assert versions == list(range(count))
    server.close()
