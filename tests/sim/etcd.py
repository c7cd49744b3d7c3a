"""A process's client of the simulated etcd: late answers, lost ones, and times at which etcd is not there.

`SimEtcd` is the store, and passes the conformance tests of the real one. This is the way to it: what a call may end in
is what `Etcd` promises (see the table there), and a watch's stream ends when the way does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from graphft.runtime.etcd import Ambiguous, EtcdError, EtcdUnreachable
from graphft.runtime.etcd.model import Compare, Op, StreamEnded, TxnResult, WatchBatch, applied_before, get_op
from tests.sim.etcd_store import SimEtcd, SimStream
from tests.sim.world import Process, World

T = TypeVar("T")
TIMEOUT, DEADLINE = 1.0, 10.0
"""Seconds: of one try, and of one call."""
FIRST_PAUSE, LAST_PAUSE = 0.02, 0.25


class Unanswered(Exception):
    """One try of a call: it was carried out, or not."""


class Way:
    """The way between processes and etcd. `lossy`: the share of the tries that is lost, half of them after they were
    carried out. `away`: processes that do not reach etcd now; None among them: no process does."""

    def __init__(self, world: World, store: SimEtcd) -> None:
        self.world, self.store = world, store
        self.lossy, self.latency, self.lag = 0.0, 0.003, 0.02
        self.away: list[Process | None] = []
        self.streams: list[Stream] = []

    def stands(self, process: Process) -> bool:
        return None not in self.away and process not in self.away

    def backup(self) -> Callable[[], None]:
        """Returns what puts etcd back to what it holds now. Leases begin anew then, as after a restart."""
        store = self.store
        kvs, leases, history = dict(store._kvs), dict(store._leases), list(store._history)
        keys = {lease: set(found.keys) for lease, found in leases.items()}
        revision, compacted, last = store.revision, store._compacted, store._last_lease

        def restore() -> None:
            self.world.tell("etcd", "is put back from revision %d to %d", (store.revision, revision))
            store._kvs, store._leases, store._history = dict(kvs), dict(leases), list(history)
            for lease, found in leases.items():
                found.keys, found.ends = set(keys[lease]), self.world.now + found.ttl
                self.world.after(found.ttl, store.expire)
            store.revision, store._compacted = revision, compacted
            store._last_lease = max(last, store._last_lease)
            self.cut(None, 0.5)

        return restore

    def cut(self, process: Process | None, seconds: float) -> None:
        """Takes the way away for a while. None: etcd itself ends, and comes back."""
        self.away.append(process)
        self.world.tell("etcd", "out of reach of %s for %.1f s", (process.name if process else "all", seconds))
        for stream in [s for s in self.streams if process in (None, s.process)]:
            stream.end()
        self.world.after(seconds, lambda: self.away.remove(process))


def _called(name: str) -> Any:
    """Returns the method of that name: the store's own, on the way to it."""

    def call(self: Client, *arguments: Any, deadline: float | None = None, **options: Any) -> Any:
        method = functools.partial(getattr(self._store, name), *arguments, **options)
        return self._repeat(f"{name} {arguments[:1]}", method, deadline, EtcdUnreachable)[0]

    return call


class Client:
    """The `Store` of one process."""

    endpoints: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()

    def __init__(self, way: Way, process: Process) -> None:
        self._way, self._process, self._world, self._store = way, process, way.world, way.store

    def close(self) -> None:
        """It has nothing of its own."""

    # -- tries ------------------------------------------------------------------------------------------------------

    def _try(self, what: str, call: Callable[[], T], timeout: float) -> T:
        """One try. Raises Unanswered; what etcd refuses."""
        world, way, end = self._world, self._way, self._world.now + timeout
        world.effect(what)
        if not way.stands(self._process):
            world.sleep(min(timeout, world.random.choice((0.001, timeout))))  # refused, or silence
            raise Unanswered
        world.sleep(min(timeout, world.random.uniform(0, way.latency)))
        fate = world.random.random() if way.lossy else 1.0
        if fate < way.lossy / 2 or not way.stands(self._process):
            world.sleep(max(0.0, end - world.now))
            raise Unanswered
        result = call()
        world.effect(f"the answer of {what}")
        if fate < way.lossy:
            world.sleep(max(0.0, end - world.now))
            raise Unanswered
        world.sleep(min(max(0.0, end - world.now), world.random.uniform(0, way.latency)))
        return result

    def _repeat(
        self, what: str, call: Callable[[], T], deadline: float | None, failed: type[EtcdError], again: bool = True
    ) -> tuple[T, int]:
        """Returns what the call returns, and the number of tries. Raises `failed`. Without `again` there is one try."""
        end, pause, tries = self._world.now + (DEADLINE if deadline is None else deadline), FIRST_PAUSE, 0
        while True:
            tries += 1
            left = max(0.01, end - self._world.now)
            try:
                return self._try(what, call, min(left, TIMEOUT) if again else left), tries
            except Unanswered:
                if not again or self._world.now + pause >= end:
                    raise failed(f"no answer to {what}", rule="etcd-unreachable") from None
            self._world.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    # -- Store ------------------------------------------------------------------------------------------------------

    ping, get, range, count = _called("ping"), _called("get"), _called("range"), _called("count")
    put, delete, delete_prefix = _called("put"), _called("delete"), _called("delete_prefix")
    lease_revoke = _called("lease_revoke")

    def txn(
        self,
        compare: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        token: str | None = None,
        repeats: bool = False,
        deadline: float | None = None,
    ) -> TxnResult:
        if token is not None:
            failure, repeats = (*failure, get_op(token)), True
        end = self._world.now + (DEADLINE if deadline is None else deadline)
        if not self._way.stands(self._process):
            self.ping(deadline=max(0.01, end - self._world.now))
        what, left = "txn " + " ".join(f"{op.kind} {op.key}" for op in success), end - self._world.now
        call = functools.partial(self._store.txn, compare, success, failure)
        result, tries = self._repeat(what, call, left, Ambiguous, repeats)
        if result.ok or token is None:
            return result
        applied = applied_before(token, success, result) if tries > 1 else None
        return TxnResult(False, result.revision, result.responses[:-1]) if applied is None else TxnResult(True, applied)

    def lease_grant(self, ttl: int, *, deadline: float | None = None) -> tuple[int, int]:
        call = functools.partial(self._store.lease_grant, ttl)
        (lease, granted), _ = self._repeat("grant a lease", call, deadline, EtcdUnreachable)
        self._world.after(granted, self._store.expire)
        return lease, granted

    def lease_keepalive_once(self, lease: int, *, deadline: float | None = None) -> int:
        call = functools.partial(self._store.lease_keepalive_once, lease)
        ttl, _ = self._repeat(f"renew lease {lease}", call, deadline, EtcdUnreachable)
        self._world.after(ttl, self._store.expire)  # also when nobody calls etcd
        return ttl

    def is_full(self) -> bool:
        return False

    def watch(self, prefix: str, start_revision: int) -> Stream:
        return Stream(self._way, self._process, self._store.watch(prefix, start_revision))


class Stream:
    """A `WatchStream` that lags, and ends when its process does not reach etcd any more."""

    def __init__(self, way: Way, process: Process, inner: SimStream) -> None:
        self._way, self.process, self._inner = way, process, inner
        self._broken = False
        way.streams.append(self)

    def cancel(self) -> None:
        self._inner.cancel()

    def end(self) -> None:
        self._broken = True
        self._inner.cancel()

    def __iter__(self) -> Iterator[WatchBatch]:
        world: Any = self._way.world
        try:
            if not self._way.stands(self.process):
                world.sleep(0.001)
                self._broken = True
            for batch in self._inner:
                world.sleep(world.random.uniform(0, self._way.lag))
                if self._broken:
                    break
                yield batch
            if self._broken:
                raise StreamEnded("the way to etcd is gone", rule="etcd-watch")
        finally:
            if self in self._way.streams:
                self._way.streams.remove(self)
