"""Only processes whose keys stand in the job's records are heard, and only they are believed: real sockets."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import psutil
import pytest
import zmq
from transport.rigs import LIMITS, WAIT, collect

from graphft.errors import UsageError
from graphft.runtime.protocol.messages import Hello, Pull, Push, Query, Welcome, encode
from graphft.runtime.transport import KeyPair, Login, ZmqClient, ZmqServer, channel, zeromq
from graphft.runtime.transport.address import split_key, with_key
from graphft.runtime.transport.channel import Forged
from graphft.runtime.transport.port import Limits
from tests.integration.impostor import let_everybody_in
from tests.support.waiting import until

WELCOME = Welcome(shard=0, incarnation="i", generation=1, version=2)
PUSH = Push(0, 0, 0, 0, 1, True)
FRAMES = {"none": None, "empty": b"", "small": os.urandom(1000), "large": os.urandom(200_000)}


class Job:
    """A server, and the keys that it lets in."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.login = Login(admits=lambda public: public in self.known)
        self.server = ZmqServer(LIMITS, self.login)
        self.address = self.server.bind()
        self.context = zmq.Context()

    def member(self) -> ZmqClient:
        login = Login()
        self.known.add(login.keys.public)
        client = ZmqClient("t0", LIMITS, login)
        client.connect(0, self.address)
        return client

    @contextlib.contextmanager
    def stranger(self, name: bytes = b"", password: bytes = b"", connection: bytes = b"") -> Iterator[zmq.Socket]:
        with self.context.socket(zmq.DEALER) as socket:
            socket.linger, socket.sndtimeo = 0, 500
            if name:
                socket.plain_username, socket.plain_password = name, password
            if connection:
                socket.routing_id = connection
            socket.connect(split_key(self.address)[1])
            yield socket


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.context.destroy(linger=0)
    job.server.close()


@pytest.mark.parametrize(
    "near", [(zeromq, channel), (zeromq,), (channel,), ()], ids=["both", "server", "client", "none"]
)
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_members_hear_each_other(
    job: Job, frame: bytes | None, near: Sequence[ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages go bare only where both ends see their own machine: between them may be a relay that anybody reaches."""
    for end in (zeromq, channel):
        monkeypatch.setattr(end, "is_loopback", lambda host, end=end: end in near)
    client = job.member()
    client.send(0, Query())
    (got,) = collect(job.server, 1)
    job.server.send(got.peer, WELCOME)
    assert client.receive(WAIT).message == WELCOME  # type: ignore[union-attr]
    client.send(0, PUSH, frame)
    (got,) = collect(job.server, 1)
    assert (got.message, None if got.frame is None else bytes(got.frame)) == (PUSH, frame)
    job.server.send(got.peer, WELCOME, frame)
    reply = client.receive(WAIT)
    assert reply is not None
    assert (reply.message, None if reply.frame is None else bytes(reply.frame)) == (WELCOME, frame)
    ends = client._links[0].channel, *job.server._channels.values()
    assert [end.bare for end in ends if end is not None] == [len(near) == 2] * 2
    assert not [name for name in job.server.counters if name.startswith("refused")]
    client.close()


def test_members_of_one_name_have_connections_of_their_own(job: Job) -> None:
    for client in (job.member(), job.member()):  # as a launcher reports deaths, each with new keys
        client.send(0, Query())
        job.server.send(collect(job.server, 1)[0].peer, WELCOME)
        assert client.receive(WAIT) is not None
        client.close()


def test_a_member_that_connects_before_its_record_is_seen_is_let_wait(job: Job) -> None:
    client = job.member()
    public = job.known.pop()
    client.send(0, Query())
    assert job.server.poll(0.2) == []
    job.known.add(public)
    assert [got.message for got in collect(job.server, 1)] == [Query()]
    assert not job.server.counters["refused.login"]
    client.close()


NAMES = ("nothing", "no proof", "another's proof", "the proof of another connection", "an unknown key")


@pytest.mark.parametrize("shown", NAMES)
def test_a_stranger_is_not_even_read(job: Job, shown: str) -> None:
    mine, member, connection = KeyPair(), KeyPair(), b"t0#1@"
    job.known.add(member.public)
    own, server = mine if shown == "an unknown key" else member, job.login.keys.public
    proof = {
        "another's proof": mine.channel(server, connection, server=False).proof,
        "the proof of another connection": own.channel(server, b"t0#0@", server=False).proof,
        "an unknown key": mine.channel(server, connection, server=False).proof,
    }.get(shown, "none")
    name = b"" if shown == "nothing" else f"{own.public}:t0#1@".encode()
    before = psutil.Process().memory_info().rss
    with job.stranger(name, proof.encode(), connection) as stranger:
        part = bytes(LIMITS.max_frame)
        with contextlib.suppress(zmq.Again):  # its connection may be refused already: then it has nowhere to send to
            stranger.send_multipart([encode(Hello("run-1", "t0"))])
            for _ in range(2):
                stranger.send_multipart([encode(PUSH), *[part] * 32], copy=False)
        assert job.server.poll(0.5) == []
        until(lambda: job.server.poll(0.01) or job.server.counters["refused.login"] >= bool(name))
        assert stranger.poll(100) == 0
    assert psutil.Process().memory_info().rss - before < 16 << 20
    assert not [name for name in job.server.counters if name.startswith("received")]


def test_thirty_random_attempts_are_not_answered(job: Job) -> None:
    """Messages that were recorded, changed, or sealed by another key; from the member's connection and from others."""
    chance, client = random.Random(47), job.member()
    (public,) = job.known
    client.send(0, Query())
    (got,) = collect(job.server, 1)
    link = client._links[0]
    assert link.channel is not None
    other = KeyPair().channel(job.login.keys.public, b"x", server=False)
    recorded = [link.channel.seal(encode(Pull(0, -1, n)), None, None) for n in range(4)]
    for sealed in recorded:
        link.socket.send_multipart([sealed])
    collect(job.server, 4)
    for attempt in range(30):
        forged = bytearray(chance.choice([*recorded, other.seal(encode(Pull(0, -1, 9)), None, None)]))
        if attempt % 3:
            forged[chance.randrange(len(forged))] ^= 1 << chance.randrange(8)
        if attempt % 2:
            link.socket.send_multipart([bytes(forged)])
            until(lambda n=attempt // 2 + 1: job.server.poll(0.01) or job.server.counters["refused.forged"] == n)
        else:
            name = f"{public}:{got.peer.decode()}".encode()
            with job.stranger(name, link.channel.proof.encode() if attempt % 4 else b"none", got.peer) as stranger:
                with contextlib.suppress(zmq.Again):
                    stranger.send_multipart([bytes(forged)])
                assert stranger.poll(20) == 0
    assert job.server.poll(0.1) == []
    assert job.server.counters["received"] == 5
    assert client.receive(0) is None
    client.close()


def test_a_frame_belongs_to_its_header() -> None:
    one, two = (KeyPair() for _ in range(2))
    client, server = one.channel(two.public, b"c", server=False), two.channel(one.public, b"c", server=True)
    sealed = client.seal(b"header", None, memoryview(b"frame"))
    for wrong in (b"Frame", b"fram", b""):
        with pytest.raises(Forged):
            server.open(memoryview(sealed), memoryview(wrong))
    with pytest.raises(Forged):
        server.open(memoryview(sealed), None)
    assert server.open(memoryview(sealed), memoryview(b"frame"))[0] == b"header"
    with pytest.raises(Forged):
        server.open(memoryview(sealed), memoryview(b"frame"))
    with pytest.raises(Forged):  # bare, but not from this machine
        server.open(memoryview(b"header"), memoryview(b"frame"))
    with pytest.raises(Forged):  # each direction has a key of its own
        client.open(memoryview(client.seal(b"header", None, None)), None)


def test_a_listener_without_the_key_of_the_record_learns_nothing(job: Job) -> None:
    """A process that takes a dead server's port sees no readable byte of a message, and is not believed."""
    client = job.member()
    client.send(0, Query())
    (got,) = collect(job.server, 1)
    job.server.send(got.peer, WELCOME)
    assert client.receive(WAIT) is not None
    port = int(split_key(job.address)[1].rpartition(":")[2])
    job.server.close()
    context, heard = zmq.Context(), list[bytes]()
    raw = context.socket(zmq.ROUTER)
    raw.plain_server, raw.linger = True, 0
    threading.Thread(target=let_everybody_in, args=(context, []), daemon=True).start()
    until(lambda: _bound(lambda: raw.bind(f"tcp://127.0.0.1:{port}")))
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        for message, frame in ((PUSH, b"gradient" * 20_000), (Hello("the run", "t0"), None)):
            client.send(0, message, frame)
        while raw.poll(20):
            parts = raw.recv_multipart()
            heard += parts[1:]
            raw.send_multipart([parts[0], encode(WELCOME)])
            raw.send_multipart([parts[0], *parts[1:]])
    assert client.receive(0) is None
    assert not any(word in part for part in heard for word in (b"gradient", b"the run"))
    assert heard, "it was connected to"
    client.close()
    raw.close()
    context.term()  # it ends the thread


def _bound(bind: Callable[[], object]) -> bool:
    with contextlib.suppress(UsageError, zmq.ZMQError):
        bind()
        return True
    return False


def test_a_connection_that_broke_is_made_again(job: Job) -> None:
    client = job.member()
    client.send(0, Query())
    collect(job.server, 1)
    port = int(split_key(job.address)[1].rpartition(":")[2])
    job.server.close()
    job.server = ZmqServer(LIMITS, job.login)
    until(lambda: _bound(lambda: job.server.bind(port=port)))

    def heard() -> bool:
        client.send(0, Query())
        return bool(job.server.poll(0.05))

    until(heard)
    client.close()


def test_an_address_without_a_key_is_refused() -> None:
    client = ZmqClient("t0", LIMITS, Login())
    for address in ("tcp://127.0.0.1:9", with_key("tcp://127.0.0.1:9", "junk")):
        with pytest.raises(UsageError, match="address"):
            client.connect(0, address)
    client.close()


def test_a_part_larger_than_any_bucket_ends_the_connection_of_its_sender() -> None:
    login = Login(admits=lambda public: True)
    server = ZmqServer(Limits(max_frame=100_000, max_header=500), login)
    client, other = (ZmqClient(name, Limits(), Login()) for name in ("faulty", "t0"))
    address = server.bind()
    for peer in (client, other):
        peer.connect(0, address)
        peer.send(0, Query())
    for got in collect(server, 2):
        server.send(got.peer, WELCOME)
    for peer in (client, other):
        assert peer.receive(WAIT) is not None
    client.send(0, Query(), bytes(1 << 20))
    other.send(0, Query())
    assert [g.peer[:2] for g in collect(server, 1)] == [b"t0"]
    for transport in (client, other, server):
        transport.close()


def test_what_a_peer_makes_a_server_queue_has_a_bound() -> None:
    server = ZmqServer(Limits(max_queued=50))
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.linger, reader.rcvhwm = 0, 1
        reader.connect(server.bind())
        reader.send(encode(Query()))
        (got,) = collect(server, 1)
        for _ in range(200):
            server.send(got.peer, WELCOME, bytes(1 << 20))
        assert server.counters["sent"] < 150
        assert server.counters["unroutable"] > 50
    server.close()
