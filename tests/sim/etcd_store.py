"""A store in memory with etcd's semantics, for simulated time: what `Etcd` does, without a server, deterministic.

It passes the same conformance tests as the real one. Time is the injected clock's: leases that have run out are ended
at the next call, or by `expire`. Ids count up. Watches replay the history by revision, as etcd's do.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from graphft.runtime.etcd.model import (
    KV,
    MAX_TXN_OPS,
    CompactedError,
    Compare,
    EtcdError,
    Event,
    LeaseLost,
    Op,
    RangeResult,
    TxnResult,
    WatchBatch,
    delete_prefix_op,
    put_op,
)


@dataclass(slots=True)
class _Lease:
    ttl: int
    ends: float
    keys: set[str] = field(default_factory=set)


class SimEtcd:
    """See `Etcd` for the methods; `deadline` is taken and not needed. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._streams: dict[SimStream, None] = {}
        self._kvs: dict[str, KV] = {}
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0
        self._history: list[Event] = []  # of revisions > _compacted
        self._compacted = 0
        self.revision = 1

    @property
    def endpoints(self) -> tuple[str, ...]:
        return ()

    @property
    def urls(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        """Nothing to close: the store lives as long as the object."""

    def ping(self, deadline: float = 3.0) -> None:
        self.expire()

    def expire(self) -> None:
        """End the leases that have run out by now, and wake the watches."""
        with self._lock:
            self._expire()

    def get(self, key: str, *, deadline: float | None = None) -> KV | None:
        with self._lock:
            self._expire()
            return self._kvs.get(key)

    def range(self, prefix: str, *, keys_only: bool = False, deadline: float | None = None) -> RangeResult:
        with self._lock:
            self._expire()
            return self._range(prefix, keys_only)

    def count(self, prefix: str, *, deadline: float | None = None) -> int:
        return len(self.range(prefix).kvs)

    def put(self, key: str, value: bytes, lease: int = 0, *, deadline: float | None = None) -> int:
        return self.txn([], [put_op(key, value, lease)]).revision

    def delete(self, key: str, *, deadline: float | None = None) -> None:
        self._delete_all([key])

    def delete_prefix(self, prefix: str, *, deadline: float | None = None) -> None:
        whole = delete_prefix_op(prefix)
        with self._lock:
            self._delete_all([kv.key for kv in self._range(whole.key).kvs])

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
        _check(compare, success, failure)
        with self._lock:
            self._expire()
            ok = all(self._holds(c) for c in compare)
            branch = success if ok else failure
            for op in branch:  # before anything is changed
                if op.kind == "put" and op.lease and op.lease not in self._leases:
                    raise LeaseLost(f"lease {op.lease:x} does not exist (any more)", rule="etcd-lease")
            before = len(self._history)
            responses = [self._apply(op) for op in branch]
            self._commit(before)
            dated = (replace(r, revision=self.revision) if isinstance(r, RangeResult) else r for r in responses)
            return TxnResult(ok, self.revision, tuple(dated))

    def lease_grant(self, ttl: int, *, deadline: float | None = None) -> tuple[int, int]:
        with self._lock:
            self._expire()
            self._last_lease += 1
            self._leases[self._last_lease] = _Lease(ttl, self._clock() + ttl)
            return self._last_lease, ttl

    def lease_keepalive_once(self, lease: int, *, deadline: float | None = None) -> int:
        with self._lock:
            self._expire()
            found = self._leases.get(lease)
            if found is None:
                raise LeaseLost(f"lease {lease:x} has expired", rule="etcd-lease")
            found.ends = self._clock() + found.ttl
            return found.ttl

    def lease_revoke(self, lease: int, *, deadline: float | None = None) -> None:
        with self._lock:
            self._expire()
            self._end_lease(lease)

    def compact(self, revision: int, *, deadline: float | None = None) -> None:
        with self._lock:
            if not self._compacted < revision <= self.revision:
                raise CompactedError(f"revision {revision} is compacted already, or lies ahead", self._compacted)
            self._history = [e for e in self._history if e.kv.mod_revision > revision]
            self._compacted = revision

    def is_full(self) -> bool:
        return False

    def watch(self, prefix: str, start_revision: int) -> SimStream:
        return SimStream(self, prefix, start_revision)

    def events_since(self, prefix: str, revision: int) -> WatchBatch:
        """The events of `prefix` from `revision` on; `CompactedError` when some of them are forgotten."""
        with self._lock:
            self._expire()
            if revision <= self._compacted:
                raise CompactedError("the watched revision has been compacted", self._compacted)
            new = itertools.takewhile(lambda e: e.kv.mod_revision >= revision, reversed(self._history))
            events = [e for e in new if e.kv.key.startswith(prefix)]
            return WatchBatch(self.revision, tuple(reversed(events)))

    def _range(self, prefix: str, keys_only: bool = False) -> RangeResult:
        kvs = [self._kvs[key] for key in sorted(key for key in self._kvs if key.startswith(prefix))]
        return RangeResult(tuple(replace(kv, value=b"") if keys_only else kv for kv in kvs), self.revision)

    def _holds(self, compare: Compare) -> bool:
        kv = self._kvs.get(compare.key)
        if kv is None:
            return compare.target != "value" and compare.operand == 0
        return (
            compare.operand == {"create": kv.create_revision, "mod": kv.mod_revision, "value": kv.value}[compare.target]
        )

    def _apply(self, op: Op) -> RangeResult | int | None:
        """One op of a transaction, at the revision that the transaction gets if it changes anything."""
        if op.kind == "get":
            kv = self._kvs.get(op.key)
            return RangeResult((kv,) if kv else (), self.revision)
        if op.kind == "range":
            return self._range(op.key, op.keys_only)
        if op.kind == "delete-prefix":
            return sum(self._apply(Op("delete", kv.key)) == 1 for kv in self._range(op.key).kvs)
        old = self._kvs.get(op.key)
        if old is not None and old.lease in self._leases:
            self._leases[old.lease].keys.discard(op.key)
        revision = self.revision + 1
        if op.kind == "delete":
            if old is None:
                return 0
            del self._kvs[op.key]
            self._history.append(Event("delete", KV(op.key, b"", 0, revision, 0)))
            return 1
        created, version = (old.create_revision, old.version) if old else (revision, 0)
        kv = KV(op.key, op.value, created, revision, version + 1, op.lease)
        self._kvs[op.key] = kv
        self._history.append(Event("put", kv))
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        return None

    def _commit(self, before: int) -> None:
        if len(self._history) > before:
            self.revision += 1
            keys = [event.kv.key for event in self._history[before:]]
            for stream in list(self._streams):
                stream.tell(keys)

    def _delete_all(self, keys: Sequence[str]) -> None:
        with self._lock:
            self._expire()
            before = len(self._history)
            for key in keys:
                self._apply(Op("delete", key))
            self._commit(before)

    def _expire(self) -> None:
        now = self._clock()
        for lease in [id for id, lease in self._leases.items() if lease.ends <= now]:
            self._end_lease(lease)

    def _end_lease(self, lease: int) -> None:
        found = self._leases.pop(lease, None)
        if found is None:
            return
        before = len(self._history)
        for key in sorted(found.keys):
            self._apply(Op("delete", key))
        self._commit(before)


class SimStream:
    """A `WatchStream` over the history. Iterating blocks; a single-threaded simulation calls `poll` instead."""

    def __init__(self, store: SimEtcd, prefix: str, start_revision: int) -> None:
        self._store, self._prefix, self._next = store, prefix, start_revision
        self._changed = threading.Condition(store._lock)
        self._cancelled = False

    def poll(self) -> WatchBatch:
        """Returns what has happened since the last poll; perhaps no events."""
        batch = self._store.events_since(self._prefix, self._next)
        self._next = max(self._next, batch.revision + 1)
        return batch

    def tell(self, keys: Sequence[str]) -> None:
        """These have changed; the store's lock is held."""
        if any(key.startswith(self._prefix) for key in keys):
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[WatchBatch]:
        yield WatchBatch(self._store.revision)
        self._store._streams[self] = None
        try:
            while not self._cancelled:
                batch = self.poll()
                if batch.events:
                    yield batch
                self._await_change(batch.revision)
        finally:
            del self._store._streams[self]

    def _await_change(self, revision: int) -> None:
        """Returns when a key of the prefix has changed, perhaps also when others have."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._store.revision > revision)


def _check(compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> None:
    """Refuses what etcd does: too many operations, or a key changed twice in one branch."""
    for branch in (success, failure):
        changed = [op.key for op in branch if op.kind in ("put", "delete")]
        if max(len(compare), len(branch)) > MAX_TXN_OPS or len(changed) > len(set(changed)):
            raise EtcdError("too many operations, or a duplicate key", rule="etcd-request")
