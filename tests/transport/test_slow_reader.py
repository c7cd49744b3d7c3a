"""A frame is ZeroMQ's until it is written out: what happens to it behind a reader that does not read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transport.relay import Relay
from transport.rigs import collect

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import Push, Query
from graphft.runtime.transport.address import split_endpoint
from graphft.runtime.transport.buffers import BucketBuffers, BucketLayout, as_tensor
from graphft.runtime.transport.zeromq import ZmqClient, ZmqServer

NUMEL = 4 << 20  # 16 MB: more than the kernel buffers between sender and reader


@pytest.fixture
def path() -> Iterator[tuple[ZmqServer, Relay, ZmqClient]]:
    server = ZmqServer()
    relay = Relay(split_endpoint(server.bind()))
    client = ZmqClient("t0")
    client.connect(0, relay.address)
    client.send(0, Query())
    collect(server, 1)
    relay.paused.set()
    yield server, relay, client
    client.close()
    relay.close()
    server.close()


def push(step: int) -> Push:
    return Push(generation=0, step=step, slot=0, bucket=0, samples=1, want=True)


def test_a_frame_changed_too_early_arrives_changed_and_done_says_so(path: tuple[ZmqServer, Relay, ZmqClient]) -> None:
    server, relay, client = path
    frame = bytearray(b"a" * (4 * NUMEL))
    sent = client.send(0, push(0), frame)
    assert not sent.wait(0.2)
    frame[:] = b"b" * len(frame)
    relay.paused.clear()
    (got,) = collect(server, 1)
    assert got.frame is not None
    assert got.frame[-1] == ord("b")  # hence the buffers below
    assert sent.wait(120)


def test_buffers_are_reused_only_when_they_are_free(path: tuple[ZmqServer, Relay, ZmqClient]) -> None:
    server, relay, client = path
    gradient = torch.empty(NUMEL)
    buffers = BucketBuffers(BucketLayout.of([gradient], [(0, NUMEL)]), copies=2)
    for step in range(2):
        gradient.fill_(step)
        buffers.pin(client.send(0, push(step), buffers.pack([gradient])))
    gradient.fill_(2)
    with pytest.raises(GraphftError) as raised:
        buffers.pack([gradient], timeout_s=0.1)
    assert raised.value.rule == "buffer-in-use"
    relay.paused.clear()
    for step in range(2, 5):
        gradient.fill_(step)
        buffers.pin(client.send(0, push(step), buffers.pack([gradient], timeout_s=120)))
    for step, got in enumerate(collect(server, 5)):
        assert got.message == push(step)
        assert got.frame is not None
        assert torch.equal(as_tensor(got.frame, torch.float32), torch.full((NUMEL,), float(step)))


def test_dropping_the_connection_frees_its_frames(path: tuple[ZmqServer, Relay, ZmqClient]) -> None:
    _, _, client = path
    sent = [client.send(0, push(step), bytes(4 * NUMEL)) for step in range(3)]
    assert not any(s.wait(0.05) for s in sent)
    client.disconnect(0)
    assert all(s.wait(120) for s in sent)
