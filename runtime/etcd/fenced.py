"""A store whose writes hold only while one key has one value: what a process of one run uses.

Every process of a run writes through this, with the record that names the run as the fence. Another run of the same
name replaces that record; what a process of the run before does from then on changes nothing, and ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphft.errors import UsageError
from graphft.runtime.etcd.errors import LeaseLost
from graphft.runtime.etcd.model import (
    KV,
    Compare,
    Op,
    RangeResult,
    Store,
    TxnResult,
    Verify,
    WatchStream,
    delete_op,
    delete_prefix_op,
    get_op,
    put_op,
    value_is,
)


class FencedStore:
    """See `Etcd` for the methods. Reads and leases pass through; a write is a transaction that compares the fence.

    A transaction (also one that only reads) under another value raises GraphftError[foreign-job], under none LeaseLost:
    the run's records are gone, and with them whatever this process has claimed.
    """

    def __init__(self, store: Store, key: str, value: bytes) -> None:
        self.store, self.key, self.value = store, key, value

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self.store.endpoints

    @property
    def urls(self) -> tuple[str, ...]:
        return self.store.urls

    def txn(
        self,
        compare: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        token: str | None = None,
        verify: Verify | None = None,
        deadline: float | None = None,
    ) -> TxnResult:
        result = self.store.txn(
            [*compare, value_is(self.key, self.value)],
            success,
            [*failure, get_op(self.key)],
            token=token,
            verify=None if verify is None else lambda r: verify(_without_fence(r)),
            deadline=deadline,
        )
        if result.ok:
            return result
        self._check(result.kv(-1))
        return _without_fence(result)

    def _check(self, found: KV | None) -> None:
        if found is None:
            raise LeaseLost(
                f"{self.key} is gone: the records of this run were deleted, or etcd has lost its data",
                rule="etcd-lease",
                help="start the process again",
            )
        if found.value != self.value:
            raise UsageError(
                f"{self.key} is {found.value.decode(errors='replace')!r} now, this process is of run "
                f"{self.value.decode()!r}: another run has taken its place",
                rule="foreign-job",
                help="end this process; give runs that use one etcd at the same time different names",
            )

    def put(self, key: str, value: bytes, lease: int = 0, *, deadline: float | None = None) -> int:
        # Applying it twice does no harm, so it is repeated until it is answered.
        return self.txn([], [put_op(key, value, lease)], verify=_never, deadline=deadline).revision

    def delete(self, key: str, *, deadline: float | None = None) -> int:
        return _deleted(self.txn([], [delete_op(key)], verify=_never, deadline=deadline))

    def delete_prefix(self, prefix: str, *, deadline: float | None = None) -> int:
        return _deleted(self.txn([], [delete_prefix_op(prefix)], verify=_never, deadline=deadline))

    def ping(self, deadline: float = 3.0) -> None:
        self.store.ping(deadline)

    def get(self, key: str, *, deadline: float | None = None) -> KV | None:
        return self.store.get(key, deadline=deadline)

    def range(
        self, prefix: str, *, limit: int = 0, keys_only: bool = False, deadline: float | None = None
    ) -> RangeResult:
        return self.store.range(prefix, limit=limit, keys_only=keys_only, deadline=deadline)

    def count(self, prefix: str, *, deadline: float | None = None) -> int:
        return self.store.count(prefix, deadline=deadline)

    def lease_grant(self, ttl: int, *, deadline: float | None = None) -> tuple[int, int]:
        return self.store.lease_grant(ttl, deadline=deadline)

    def lease_keepalive_once(self, lease: int, *, deadline: float | None = None) -> int:
        return self.store.lease_keepalive_once(lease, deadline=deadline)

    def lease_revoke(self, lease: int, *, deadline: float | None = None) -> bool:
        return self.store.lease_revoke(lease, deadline=deadline)

    def compact(self, revision: int, *, deadline: float | None = None) -> None:
        self.store.compact(revision, deadline=deadline)

    def is_full(self) -> bool:
        return self.store.is_full()

    def watch(self, prefix: str, start_revision: int) -> WatchStream:
        return self.store.watch(prefix, start_revision)

    def close(self) -> None:
        self.store.close()


def _without_fence(result: TxnResult) -> TxnResult:
    """A failed transaction's result as its caller knows it: without what the fence has read."""
    return replace(result, responses=result.responses[:-1])


def _never(failed: TxnResult) -> int | None:
    return None


def _deleted(result: TxnResult) -> int:
    count = result.responses[0] if result.responses else 0
    return count if isinstance(count, int) else 0
