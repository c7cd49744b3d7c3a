"""Lock and election, after etcd's `clientv3/concurrency`.

A contender puts a key of its own under its lease; the oldest key (least create_revision) holds. The others wait for the
deletion of the key just before their own, so a release wakes one of them and not all.

A lock alone protects nothing: its holder may be paused, lose its lease, and write after someone else has taken over.
So every write that relies on it must carry the fence, which is the holder's own key:

    store.txn([lock.fence(), ...], [put_op(...), ...])

| the holder ... | the write ... |
| --- | --- |
| still holds | is applied |
| lost its lease, or released, before etcd got the write | is refused: ok=False |
| loses its lease just after | was applied before anyone else could hold |
| gets no answer | see `Etcd.txn`: with a token it is looked up; applied at most once, and only while held |
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping

from graphft.runtime.etcd.errors import EtcdError, LeaseLost
from graphft.runtime.etcd.lease import Session
from graphft.runtime.etcd.model import KV, Compare, Store, absent, create_is, put_op
from graphft.runtime.etcd.watch import Watch

CHECK = 0.2  # seconds between looks at one's own lease while waiting


def holder(store: Store, name: str) -> KV | None:
    """The key that holds the lock or election `name` at this moment, if any."""
    kvs = store.range(f"{name}/").kvs
    return min(kvs, key=lambda kv: kv.create_revision, default=None)


class _Contender:
    """A key in the queue for `name`, under `session`'s lease. Not thread-safe; one object per contending thread.

    The session must be renewed elsewhere (`run_thread`, or a daemon block) while this waits.
    """

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name.rstrip("/")
        self.key = ""  # made anew each time: a late echo of an earlier attempt meets nothing of this one
        self.revision = 0  # the key's create_revision, once it holds
        self._store = session.store

    @property
    def held(self) -> bool:
        """Whether this was acquired and its lease is certain to live. Writes need the fence all the same."""
        return self.revision > 0 and self.session.alive()

    def fence(self) -> Compare:
        """The condition under which a write may rely on this; to be part of every such transaction."""
        if not self.revision:
            raise EtcdError(
                f"{self.name} is not held by this session", rule="etcd-lock", help="acquire it before using its fence"
            )
        return create_is(self.key, self.revision)

    def _acquire(self, value: bytes, timeout: float | None, while_waiting: Callable[[], object] = bool) -> bool:
        if self.revision:
            raise EtcdError(
                f"{self.name} is held already", rule="etcd-lock", help="release it before acquiring it again"
            )
        self.session.check()
        end = None if timeout is None else time.monotonic() + timeout
        self.key = f"{self.name}/{self.session.lease:016x}-{secrets.token_hex(8)}"
        try:
            put = put_op(self.key, value, self.session.lease)
            own = self._store.txn([absent(self.key)], [put], token=self.key).revision
            while (before := self._predecessor(own)) is not None:
                if not self._await_deleted(before, end, while_waiting):
                    self._release()
                    return False
        except BaseException:
            with contextlib.suppress(EtcdError):  # the key goes with the lease; what led here matters more
                self._release()
            raise
        self.revision = own
        return True

    def _release(self) -> None:
        if self.key:
            self._store.delete(self.key)
            self.key, self.revision = "", 0

    def _predecessor(self, own: int) -> KV | None:
        """The youngest key older than the own one; None: this holds. `LeaseLost` when the own key is gone."""
        self.session.check()
        kvs = self._store.range(f"{self.name}/").kvs
        if all(kv.key != self.key for kv in kvs):
            raise LeaseLost(
                f"the key of {self.name} vanished while waiting for it",
                rule="etcd-lease",
                help="the session's lease ended; start anew with a new one",
            )
        older = [kv for kv in kvs if kv.create_revision < own]
        return max(older, key=lambda kv: kv.create_revision, default=None)

    def _await_deleted(self, before: KV, end: float | None, while_waiting: Callable[[], object]) -> bool:
        def gone(view: Mapping[str, KV]) -> bool:
            return before.key not in view

        with Watch(self._store, before.key) as watch:
            while True:
                self.session.check()
                while_waiting()
                left = CHECK if end is None else min(CHECK, end - time.monotonic())
                if watch.wait(gone, left):
                    return True
                if left <= 0:
                    return False


class Lock(_Contender):
    """Mutual exclusion: `with Lock(session, "/job/lock") as lock: store.txn([lock.fence(), ...], ...)`."""

    def acquire(self, timeout: float | None = None, while_waiting: Callable[[], object] = bool) -> bool:
        """Wait until this holds. False after `timeout` seconds (0: just try), having withdrawn. `LeaseLost`.

        `while_waiting` is called some times a second meanwhile; what it raises ends the wait, and withdraws.
        """
        return self._acquire(b"", timeout, while_waiting)

    def release(self) -> None:
        """Give the lock up. Does nothing if it is not held."""
        self._release()

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Election(_Contender):
    """One leader at a time, who publishes a value. Others read it with `holder(store, name)`, or watch the prefix."""

    def campaign(self, value: bytes, timeout: float | None = None) -> bool:
        """Wait until this leads. False after `timeout` seconds, having withdrawn. `LeaseLost`."""
        return self._acquire(value, timeout)

    def proclaim(self, value: bytes) -> int:
        """Change the leader's value; returns the revision. `LeaseLost` when this leads no more."""
        put = put_op(self.key, value, self.session.lease)
        # Applying it twice does no harm, so it is repeated until it is answered.
        result = self._store.txn([self.fence()], [put], verify=lambda failed: None)
        if not result.ok:
            raise LeaseLost(
                f"this leads {self.name} no more", rule="etcd-lease", help="campaign again in a new session"
            )
        return result.revision

    def resign(self) -> None:
        """Step down. Does nothing if this does not lead."""
        self._release()
