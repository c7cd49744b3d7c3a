"""The transports of a role's process: ZeroMQ; messages get lost, late, doubled or out of order on purpose, by a
wrapper around any driver, where the environment asks for that.

What happens to the n-th message that a wrapped transport sends is a function of the seed and n alone. Faults are
injected while sending; wrap both sides for both directions. Late messages leave with a later call, so they need the
wrapped side to keep polling or receiving, as every role does.
"""

from __future__ import annotations

import heapq
import os
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeVar

import msgspec

from graphft.errors import GraphftError, UsageError
from graphft.runtime.protocol.messages import Message
from graphft.runtime.transport.login import Login
from graphft.runtime.transport.port import (
    ClientTransport,
    Frame,
    Limits,
    Received,
    Released,
    Reply,
    Sent,
    ServerTransport,
)
from graphft.runtime.transport.zeromq_client import ZmqClient
from graphft.runtime.transport.zeromq_server import ZmqServer

Clock = Callable[[], float]
T = TypeVar("T")
VARIABLE = "GRAPHFT_FAULTS"
"""JSON with fields of `Faults`, such as {"seed": 1, "drop": 0.001}: what messages are to suffer. For tests."""


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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("drop", "duplicate", "delay", "reorder") and not 0 <= value <= 1:
                raise GraphftError(
                    f"faults: {field.name} = {value} is no share of messages",
                    rule="faults",
                    help="give a number from 0 (never) to 1 (always)",
                )
        if self.max_delay < 0:
            raise GraphftError(
                f"faults: max_delay = {self.max_delay} is negative", rule="faults", help="give a number of seconds"
            )


class Fate(NamedTuple):
    """The fate of one copy of a message."""

    delay: float
    ordered: bool
    """True if it waits for those before it on its connection."""


class FaultSchedule:
    """The fates of a transport's messages, one after the other."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._random = random.Random(faults.seed)

    def next(self) -> list[Fate]:
        """The copies of the next message: none (lost), one, or two."""
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


class _Late:
    """Messages that wait for their time."""

    def __init__(self, faults: Faults, clock: Clock) -> None:
        self.counters: Counter[str] = Counter()
        self._schedule = FaultSchedule(faults)
        self._clock = clock
        self._lock = threading.RLock()
        self._waiting: list[tuple[float, int, Hashable, Callable[[], object]]] = []
        self._number = 0
        self._last: dict[Hashable, float] = {}

    def send(self, to: Hashable, frame: Frame | None, transmit: Callable[[Frame | None], Sent]) -> Sent:
        with self._lock:
            self.release()
            fates = self._schedule.next()
            now = self._clock()
            times = [self._time(to, fate, now) for fate in fates]
            self._count(fates)
            if times == [now]:
                return transmit(frame)
            kept = None if frame is None else bytes(memoryview(frame).cast("B"))
            for due in times:
                self._number += 1
                heapq.heappush(self._waiting, (due, self._number, to, lambda: transmit(kept)))
            self.release()
        return Released()

    def _time(self, to: Hashable, fate: Fate, now: float) -> float:
        due = now + fate.delay
        if fate.ordered:
            due = self._last[to] = max(due, self._last.get(to, now))
        return due

    def _count(self, fates: list[Fate]) -> None:
        self.counters["faults.drop"] += not fates
        self.counters["faults.duplicate"] += len(fates) > 1
        self.counters["faults.reorder"] += bool(fates) and not fates[0].ordered
        self.counters["faults.delay"] += bool(fates) and fates[0].ordered and fates[0].delay > 0

    def release(self) -> None:
        """Sends what is due."""
        with self._lock:
            now = self._clock()
            while self._waiting and self._waiting[0][0] <= now:
                heapq.heappop(self._waiting)[3]()

    def forget(self, to: Hashable) -> None:
        with self._lock:
            self._waiting = [w for w in self._waiting if w[2] != to]
            heapq.heapify(self._waiting)
            self._last.pop(to, None)

    def wait(self, timeout_s: float | None, inner: Callable[[float | None], T]) -> T:
        """Waits by `inner`, which takes a time-out, in portions; sends what becomes due in between."""
        end = None if timeout_s is None else self._clock() + timeout_s
        while True:
            self.release()
            with self._lock:
                due = self._waiting[0][0] if self._waiting else None
            until = min((t for t in (end, due) if t is not None), default=None)
            result = inner(None if until is None else max(0.0, until - self._clock()))
            # Before its time and with nothing: it was woken.
            if result or until is None or until == end or self._clock() < until:
                self.release()
                return result


class FaultyServer:
    """A `ServerTransport` whose answers meet faults."""

    def __init__(self, inner: ServerTransport, faults: Faults, clock: Clock = time.monotonic) -> None:
        self._inner, self._late = inner, _Late(faults, clock)

    @property
    def counters(self) -> Counter[str]:
        return Counter({**self._inner.counters, **self._late.counters})  # at once: from any thread

    def bind(self, host: str = "127.0.0.1", port: int = 0) -> str:
        return self._inner.bind(host, port)

    def poll(self, timeout_s: float | None) -> list[Received]:
        return self._late.wait(timeout_s, self._inner.poll)

    def send(self, peer: bytes, message: Message, frame: Frame | None = None, *, copy: bool | None = None) -> Sent:
        return self._late.send(peer, frame, lambda f: self._inner.send(peer, message, f, copy=copy))

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


class FaultyClient:
    """A `ClientTransport` whose requests meet faults."""

    def __init__(self, inner: ClientTransport, faults: Faults, clock: Clock = time.monotonic) -> None:
        self._inner, self._late = inner, _Late(faults, clock)

    @property
    def counters(self) -> Counter[str]:
        return Counter({**self._inner.counters, **self._late.counters})  # at once: from any thread

    def connect(self, shard: int, address: str) -> None:
        self._late.forget(shard)
        self._inner.connect(shard, address)

    def disconnect(self, shard: int) -> None:
        self._late.forget(shard)
        self._inner.disconnect(shard)

    def send(self, shard: int, message: Message, frame: Frame | None = None, *, copy: bool | None = None) -> Sent:
        return self._late.send(shard, frame, lambda f: self._inner.send(shard, message, f, copy=copy))

    def receive(self, timeout_s: float | None) -> Reply | None:
        return self._late.wait(timeout_s, self._inner.receive)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def make_client(
    identity: str, role: str, limits: Limits, login: Login, environ: Mapping[str, str] = os.environ
) -> ClientTransport:
    """A client of the shards. `role` ("trainer 0") tells the processes' faults apart."""
    faults, client = faults_of(role, environ), ZmqClient(identity, limits, login)
    return client if faults is None else FaultyClient(client, faults)


def make_server(role: str, limits: Limits, login: Login, environ: Mapping[str, str] = os.environ) -> ServerTransport:
    """A shard's server. `role` ("pserver 0") tells the processes' faults apart."""
    faults, server = faults_of(role, environ), ZmqServer(limits, login)
    return server if faults is None else FaultyServer(server, faults)


def faults_of(role: str, environ: Mapping[str, str]) -> Faults | None:
    """Returns the faults of this role's messages; each role has a schedule of its own, from the one seed."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    try:
        faults = msgspec.json.decode(text, type=Faults)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{VARIABLE} is {text!r}: {error}",
            rule="environment",
            help='give JSON such as {"seed": 1, "drop": 0.001}, or unset it',
        ) from error
    return replace(faults, seed=faults.seed ^ zlib.crc32(role.encode()))
