"""The drivers under test, behind one face: they make transports, and close them at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from graphft.runtime.protocol.messages import Message
from graphft.runtime.transport import Login
from graphft.runtime.transport.port import ClientTransport, Limits, Received, ServerTransport
from graphft.runtime.transport.zeromq import ZmqClient, ZmqServer
from tests.sim.transport import SimNetwork

LIMITS = Limits(max_frame=1 << 20, max_header=4096, poll_batch=64)
WAIT = 120.0
"""Seconds in which what is sent arrives, on a busy machine, too."""


class ZmqRig:
    def __init__(self) -> None:
        self._open: list[ServerTransport | ClientTransport] = []

    def server(self) -> ServerTransport:
        return self._keep(ZmqServer(LIMITS, Login(admits=lambda public: True)))

    def client(self, identity: str = "t0") -> ClientTransport:
        return self._keep(ZmqClient(identity, LIMITS, Login()))

    def _keep(self, transport):  # type: ignore[no-untyped-def]
        self._open.append(transport)
        return transport

    def exchange_raw(self, address: str, parts: Sequence[bytes], server: ServerTransport) -> Message | None:
        """Sends these parts from a peer that is let in; returns the answer, if one comes."""
        client = ZmqClient("stranger", LIMITS, Login())
        self._keep(client).connect(0, address)
        link = client._links[0]
        assert link.channel is not None
        link.socket.send_multipart([link.channel.seal(parts[0], None, [*parts, None][1]), *parts[1:]])
        end = time.monotonic() + WAIT
        while time.monotonic() < end and not any(k.startswith("refused") for k in server.counters):
            assert server.poll(0.05) == []
        reply = client.receive(WAIT)
        return reply.message if reply else None

    def close(self) -> None:
        for transport in self._open:
            transport.close()


class SimRig:
    def __init__(self) -> None:
        self.network = SimNetwork(limits=LIMITS)

    def server(self) -> ServerTransport:
        return self.network.server()

    def client(self, identity: str = "t0") -> ClientTransport:
        return self.network.client(identity)

    def exchange_raw(self, address: str, parts: Sequence[bytes], server: ServerTransport) -> Message | None:
        client = self.network.client("stranger")
        client.connect(0, address)
        client.send_parts(0, parts)
        assert server.poll(5) == []
        reply = client.receive(2)
        return reply.message if reply else None

    def close(self) -> None: ...


Rig = ZmqRig | SimRig
RIGS: dict[str, type[Rig]] = {"zeromq": ZmqRig, "sim": SimRig}


def collect(server: ServerTransport, count: int, timeout_s: float = WAIT) -> list[Received]:
    """The next `count` messages."""
    got: list[Received] = []
    end = time.monotonic() + timeout_s
    while len(got) < count and time.monotonic() < end:
        got += server.poll(0.2)
    assert len(got) == count, f"{len(got)} of {count} messages arrived"
    return got
