"""Writes that hold only while something still holds: a lock, and the store of one run's processes.

`Lock` is after etcd's `clientv3/concurrency`. A contender puts a key of its own under its lease; the oldest key (least
create_revision) holds. The others wait for the deletion of the key just before their own, so a release wakes one of
them and not all.

A lock alone protects nothing: its holder may be paused, lose its lease, and write after someone else has taken over.
So every write that relies on it must carry the fence, which is the holder's own key:

    store.txn([lock.fence(), ...], [put_op(...), ...])

| the holder ... | the write ... |
| --- | --- |
| still holds | is applied |
| lost its lease, or released, before etcd got the write | is refused: ok=False |
| loses its lease just after | was applied before anyone else could hold |
| gets no answer | see `Etcd.txn`: with a token it is looked up; applied at most once, and only while held |

Every process of a run writes through a `FencedStore`, with the record that names the run as the fence. Another run of
the same name replaces that record; a later write of a process of the run before changes nothing, and ends it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from graphft.errors import UsageError
from graphft.runtime.etcd.lease import Session
from graphft.runtime.etcd.model import (
    KV,
    Compare,
    EtcdError,
    LeaseLost,
    Op,
    Store,
    TxnResult,
    absent,
    create_is,
    delete_op,
    delete_prefix_op,
    get_op,
    put_op,
    value_is,
)
from graphft.runtime.etcd.watch import Watch

CHECK = 0.2  # seconds between looks at one's own lease while waiting


class Lock:
    """Mutual exclusion: after `acquire`, `store.txn([lock.fence(), ...], ...)` writes while it is held.

    Not thread-safe; one object per contending thread. The session must be renewed elsewhere (`run_thread`, or a daemon
    block) while this waits.
    """

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name
        self.key = ""  # made anew each time: a late echo of an earlier attempt meets nothing of this one
        self.revision = 0  # the key's create_revision, once it holds
        self._store = session.store

    def fence(self) -> Compare:
        """Returns the condition under which a write may rely on this; to be part of every such transaction."""
        if not self.revision:
            raise EtcdError(f"{self.name} is not held by this session", rule="etcd-lock", help="acquire it first")
        return create_is(self.key, self.revision)

    def acquire(self, while_waiting: Callable[[], object] = bool) -> None:
        """Waits until this holds. Raises `LeaseLost`.

        `while_waiting` is called some times a second meanwhile; an exception in it ends the wait, and withdraws.
        """
        self.session.check()
        self.key = f"{self.name}/{self.session.lease:016x}-{secrets.token_hex(8)}"
        try:
            put = put_op(self.key, b"", self.session.lease)
            own = self._store.txn([absent(self.key)], [put], token=self.key).revision
            while before := self._predecessor(own):
                with Watch(self._store, before) as watch:
                    while not watch.wait(lambda view: before not in view, CHECK):
                        self.session.check()
                        while_waiting()
        except BaseException:
            with contextlib.suppress(EtcdError):  # the key goes with the lease; what led here matters more
                self.release()
            raise
        self.revision = own

    def release(self) -> None:
        """Gives the lock up. Does nothing if it is not held."""
        if self.key:
            self._store.delete(self.key)
            self.key, self.revision = "", 0

    def _predecessor(self, own: int) -> str:
        """Returns the youngest key older than the own one; "": this holds. `LeaseLost` when the own key is gone."""
        self.session.check()
        kvs = self._store.range(f"{self.name}/").kvs
        if all(kv.key != self.key for kv in kvs):
            raise LeaseLost(
                f"the key of {self.name} vanished while waiting for it",
                rule="etcd-lease",
                help="the session's lease ended; start anew with a new one",
            )
        older = [(kv.create_revision, kv.key) for kv in kvs if kv.create_revision < own]
        return max(older, default=(0, ""))[1]


class FencedStore:
    """A store whose writes hold only while `key` has `value`. See `Etcd` for the methods. Reads and leases pass
    through; a write is a transaction that compares the fence.

    A transaction (also one that only reads) under another value raises GraphftError[foreign-job], under none LeaseLost:
    the run's records are gone, and with them the claims of this process.
    """

    def __init__(self, store: Store, key: str, value: bytes) -> None:
        self.store, self.key, self.value = store, key, value
        self.endpoints, self.urls = store.endpoints, store.urls
        self.ping, self.get, self.range, self.count = store.ping, store.get, store.range, store.count
        self.lease_grant, self.lease_revoke = store.lease_grant, store.lease_revoke
        self.lease_keepalive_once, self.is_full = store.lease_keepalive_once, store.is_full
        self.watch, self.close = store.watch, store.close

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
        result = self.store.txn(
            [*compare, value_is(self.key, self.value)],
            success,
            [*failure, get_op(self.key)],
            token=token,
            repeats=repeats,
            deadline=deadline,
        )
        if result.ok:
            return result
        self._check(result.kv(-1))
        return replace(result, responses=result.responses[:-1])  # without the fence's own read

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

    # Applying these twice does no harm, so they are repeated until they are answered.

    def put(self, key: str, value: bytes, lease: int = 0, *, deadline: float | None = None) -> int:
        return self.txn([], [put_op(key, value, lease)], repeats=True, deadline=deadline).revision

    def delete(self, key: str, *, deadline: float | None = None) -> None:
        self.txn([], [delete_op(key)], repeats=True, deadline=deadline)

    def delete_prefix(self, prefix: str, *, deadline: float | None = None) -> None:
        self.txn([], [delete_prefix_op(prefix)], repeats=True, deadline=deadline)
