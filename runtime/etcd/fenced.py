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
    Store,
    TxnResult,
    Verify,
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
        self.ping, self.get, self.range, self.count = store.ping, store.get, store.range, store.count
        self.lease_grant, self.lease_revoke = store.lease_grant, store.lease_revoke
        self.lease_keepalive_once, self.is_full = store.lease_keepalive_once, store.is_full
        self.compact, self.watch, self.close = store.compact, store.watch, store.close

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


def _without_fence(result: TxnResult) -> TxnResult:
    """A failed transaction's result as its caller knows it: without what the fence has read."""
    return replace(result, responses=result.responses[:-1])


def _never(failed: TxnResult) -> int | None:
    return None


def _deleted(result: TxnResult) -> int:
    count = result.responses[0] if result.responses else 0
    return count if isinstance(count, int) else 0
