"""The simulated driver: a network inside one thread, with its own time and a seeded schedule of faults.

Everything happens inside the calls: a wait moves the simulated time to the next delivery (or to its time-out). As in
ZeroMQ, a frame sent without a copy is read when it is delivered, so that changing it too early shows; messages for a
server that is not there wait for it, and a connection that breaks loses what was in flight.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphft.errors import GraphftError, UsageError
from graphft.runtime.protocol.messages import Message, encode, refusal_of_stranger
from graphft.runtime.transport.address import WILDCARDS, endpoint, split_endpoint, split_key
from graphft.runtime.transport.port import Frame, Limits, Received, Released, Reply, Sent
from graphft.runtime.transport.wire import Malformed, accept, count_sent, frame_bytes
from graphft.runtime.transport.zeromq import GONE


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of messages: shares of them, from 0 to 1."""

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    """Late, and so is all that follows on the same connection: as when TCP repeats a packet."""
    reorder: float = 0.0
    """Late, and overtaken by what follows."""
    max_delay: float = 0.05
    """Seconds; late messages are so by a random part of it."""


class Fate(NamedTuple):
    """The fate of one copy of a message. `ordered`: it waits for those before it on its connection."""

    delay: float
    ordered: bool


class FaultSchedule:
    """The fates of a network's messages, one after the other: a function of the seed alone."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._random = random.Random(faults.seed)

    def next(self) -> list[Fate]:
        """Returns the copies of the next message: none (lost), one, or two."""
        f = self._faults
        # Always the same number of draws: changing one rate leaves the other faults where they were.
        lost, doubled, late, overtaken, first, second = (self._random.random() for _ in range(6))
        if lost < f.drop:
            return []
        if overtaken < f.reorder:
            fates = [Fate(first * f.max_delay, ordered=False)]
        else:
            fates = [Fate(first * f.max_delay if late < f.delay else 0.0, ordered=True)]
        if doubled < f.duplicate:
            fates.append(Fate(second * f.max_delay, ordered=False))
        return fates


class SimNetwork:
    """Connects simulated servers and clients; owns the time (`now`, seconds) and what is under way."""

    def __init__(self, faults: Faults | None = None, latency: float = 1e-4, limits: Limits | None = None) -> None:
        self.now = 0.0
        self.limits = limits or Limits()
        self.latency = latency
        self.schedule = FaultSchedule(faults or Faults())
        self.servers: dict[str, SimServer] = {}
        self.links: list[_Link] = []
        self.numbers = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def server(self) -> SimServer:
        return SimServer(self)

    def client(self, identity: str) -> SimClient:
        return SimClient(self, identity)

    def time(self) -> float:
        """A clock for whatever runs on this network."""
        return self.now

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self.numbers), event))

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.run(self.now + seconds, lambda: False)

    def run(self, until: float, ready: Callable[[], bool]) -> None:
        """Delivers in order of time until `ready`, or until the time `until`."""
        while not ready():
            if self._events and self._events[0][0] <= until:
                self.now, _, event = heapq.heappop(self._events)
                event()
            elif until < math.inf:
                self.now = until
                return
            else:
                raise GraphftError(
                    "waiting for ever for what is never sent",
                    rule="sim-deadlock",
                    help="the simulated roles wait for each other; give the wait a time-out",
                )

    def passes(self, identity: str, address: str, header: memoryview) -> bool:
        """True if this message gets through between this client and this server now."""
        return True

    def cut(self, address: str) -> None:
        """Breaks the connections to a server; what is in flight is lost. The next message makes one again."""
        for link in self.links:
            if link.address == address:
                link.unplug()


class _Flight:
    """A message under way."""

    def __init__(self, parts: list[memoryview], sent: _SimSent | None) -> None:
        self.parts, self.sent = parts, sent

    def read(self) -> list[memoryview]:
        """Returns the bytes as they are now. Their memory is then free; a second copy arrives alike."""
        if self.sent is not None and not self.sent.done:
            self.parts = [memoryview(bytearray(p)) for p in self.parts]
            self.sent.done = True
        return self.parts

    def lose(self) -> None:
        if self.sent is not None:
            self.sent.done = True


class _SimSent:
    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self.done = False

    def wait(self, timeout_s: float | None = None) -> bool:
        self._network.run(_until(self._network, timeout_s), lambda: self.done)
        return self.done


class _Link:
    """One connection of a client to the server that was at an address when it was made; None: it is broken.
    `doubtful`: the server has not answered yet."""

    def __init__(self, client: SimClient, shard: int, address: str) -> None:
        network = client.network
        self.client, self.shard, self.address, self.network = client, shard, address, network
        self.peer = f"{client.identity}#{next(network.numbers)}".encode()
        self.server, self.doubtful = network.servers.get(address), True
        self._unread: list[_Flight] = []
        self._life = 0
        """Counts the times the connection was made; arrivals of an earlier one are lost."""
        self._last = {True: 0.0, False: 0.0}
        network.links.append(self)
        if self.server is not None:
            self.server.peers[self.peer] = self

    def unplug(self) -> None:
        if self.server is not None:
            self.server.peers.pop(self.peer, None)
            self.server = None
            self.client.lost(self)
        self._life += 1
        for flight in self._unread:
            flight.lose()
        self._unread.clear()

    def close(self) -> None:
        self.unplug()
        self.network.links.remove(self)

    def fly(self, flight: _Flight, up: bool) -> None:
        """Schedules the message's copies; `up`: from the client to the server."""
        if self.server is None:
            flight.lose()
            return
        fates = self.network.schedule.next()
        if not fates or not self.network.passes(self.client.identity, self.address, flight.parts[0]):
            flight.lose()
            return
        self._unread = [f for f in (*self._unread, flight) if f.sent is not None and not f.sent.done]
        life = self._life
        for fate in fates:
            time = self.network.now + self.network.latency + fate.delay
            if fate.ordered:
                time = self._last[up] = max(time, self._last[up])
            self.network.at(time, lambda: self._arrive(flight, up, life))

    def _arrive(self, flight: _Flight, up: bool, life: int) -> None:
        if life != self._life or self.server is None:
            return
        if up:
            self.server.take(self.peer, flight.read())
        else:
            self.doubtful = False
            self.client.take(self.shard, flight.read())


def _until(network: SimNetwork, timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else network.now + timeout_s


def _flight(network: SimNetwork, header: bytes, frame: Frame | None) -> _Flight:
    view = frame_bytes(frame, network.limits)
    if view is None:
        return _Flight([memoryview(header)], None)
    if view.nbytes < network.limits.zero_copy_from:
        return _Flight([memoryview(header), memoryview(bytearray(view))], None)
    return _Flight([memoryview(header), view], _SimSent(network))


class SimServer:
    """The simulated `ServerTransport`."""

    def __init__(self, network: SimNetwork) -> None:
        self.counters: Counter[str] = Counter()
        self.peers: dict[bytes, _Link] = {}
        self._network = network
        self._address = ""
        self._inbox: deque[Received] = deque()
        self._woken = False

    def bind(self, host: str = "127.0.0.1", port: int = 0) -> str:
        host = "127.0.0.1" if host in WILDCARDS else host
        address = endpoint(host, port or 49152 + next(self._network.numbers))
        if address in self._network.servers:
            raise UsageError(
                f"cannot listen on {address}: the port is in use",
                rule="port-in-use",
                help="choose another port, or 0 for any free one",
            )
        self._address = address
        self._network.servers[address] = self
        return address

    def poll(self, timeout_s: float | None) -> list[Received]:
        self._network.run(_until(self._network, timeout_s), lambda: bool(self._inbox) or self._woken)
        self._woken = False
        return [self._inbox.popleft() for _ in range(min(len(self._inbox), self._network.limits.poll_batch))]

    def take(self, peer: bytes, parts: Sequence[memoryview]) -> None:
        try:
            self._inbox.append(Received(peer, *accept(parts, self._network.limits, self.counters)))
        except Malformed:
            self.send(peer, refusal_of_stranger("malformed"))

    def send(self, peer: bytes, message: Message, frame: Frame | None = None) -> Sent:
        flight = _flight(self._network, encode(message), frame)
        if peer not in self.peers:
            self.counters["unroutable"] += 1
            return Released()
        count_sent(self.counters, flight.parts[1] if frame is not None else None)
        self.peers[peer].fly(flight, up=False)
        return flight.sent or Released()

    def wake(self) -> None:
        self._woken = True

    def close(self) -> None:
        """As when the process dies: connections break, what is in flight is lost."""
        if self._network.servers.get(self._address) is self:
            del self._network.servers[self._address]
        for link in list(self.peers.values()):
            link.unplug()
        self._inbox.clear()


class SimClient:
    """The simulated `ClientTransport`."""

    def __init__(self, network: SimNetwork, identity: str) -> None:
        self.counters: Counter[str] = Counter()
        self.network, self.identity = network, identity
        self._links: dict[int, _Link] = {}
        self._inbox: deque[Reply] = deque()
        self._wakes = 0
        self._closed = False

    def connect(self, shard: int, address: str) -> None:
        self._check_open()
        address = split_key(address)[1]
        split_endpoint(address)
        self.disconnect(shard)
        self._links[shard] = _Link(self, shard, address)

    def disconnect(self, shard: int) -> None:
        link = self._links.pop(shard, None)
        if link is not None:
            link.close()
            fresh = [r for r in self._inbox if r.shard != shard]
            self.counters["stale"] += len(self._inbox) - len(fresh)
            self._inbox = deque(fresh)

    def send(self, shard: int, message: Message, frame: Frame | None = None) -> Sent:
        self._check_open()
        flight = _flight(self.network, encode(message), frame)
        link = self._links.get(shard)
        if link is not None and link.server is None:
            link.close()
            link = self._links[shard] = _Link(self, shard, link.address)
        if link is None or link.server is None or (flight.sent is not None and link.doubtful):
            self.counters["unroutable"] += 1
            return Released()
        count_sent(self.counters, flight.parts[1] if frame is not None else None)
        link.fly(flight, up=True)
        return flight.sent or Released()

    def send_parts(self, shard: int, parts: Sequence[bytes]) -> None:
        """Sends these bytes as they are, to see what a server makes of them."""
        self._links[shard].fly(_Flight([memoryview(p) for p in parts], None), up=True)

    def receive(self, timeout_s: float | None) -> Reply | None:
        self._check_open()
        self.network.run(_until(self.network, timeout_s), lambda: bool(self._inbox) or self._wakes > 0)
        if self._inbox:
            return self._inbox.popleft()
        self._wakes = max(0, self._wakes - 1)
        return None

    def take(self, shard: int, parts: Sequence[memoryview]) -> None:
        with contextlib.suppress(Malformed):  # counted; a client answers nothing
            self._inbox.append(Reply(shard, *accept(parts, self.network.limits, self.counters)))

    def lost(self, link: _Link) -> None:
        if self._links.get(link.shard) is link:
            self._inbox.append(Reply(link.shard, GONE))

    def wake(self) -> None:
        self._wakes += 1

    def close(self) -> None:
        self._closed = True
        for shard in list(self._links):
            self.disconnect(shard)

    def _check_open(self) -> None:
        if self._closed:
            raise GraphftError(
                f"the transport of {self.identity} is closed", rule="transport", help="send and connect before close()"
            )
