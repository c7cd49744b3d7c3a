"""A lock, after etcd's `clientv3/concurrency`.

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
from graphft.runtime.etcd.model import KV, Compare, absent, create_is, put_op
from graphft.runtime.etcd.watch import Watch

CHECK = 0.2  # seconds between looks at one's own lease while waiting


class Lock:
    """Mutual exclusion: `with Lock(session, "/job/lock") as lock: store.txn([lock.fence(), ...], ...)`.

    Not thread-safe; one object per contending thread. The session must be renewed elsewhere (`run_thread`, or a daemon
    block) while this waits.
    """

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name.rstrip("/")
        self.key = ""  # made anew each time: a late echo of an earlier attempt meets nothing of this one
        self.revision = 0  # the key's create_revision, once it holds
        self._store = session.store

    @property
    def held(self) -> bool:
        """True if this was acquired and its lease is certain to live. Writes need the fence all the same."""
        return self.revision > 0 and self.session.alive()

    def fence(self) -> Compare:
        """The condition under which a write may rely on this; to be part of every such transaction."""
        if not self.revision:
            raise EtcdError(
                f"{self.name} is not held by this session", rule="etcd-lock", help="acquire it before using its fence"
            )
        return create_is(self.key, self.revision)

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def acquire(self, timeout: float | None = None, while_waiting: Callable[[], object] = bool) -> bool:
        """Waits until this holds. False after `timeout` seconds (0: just try), having withdrawn. `LeaseLost`.

        `while_waiting` is called some times a second meanwhile; what it raises ends the wait, and withdraws.
        """
        if self.revision:
            raise EtcdError(
                f"{self.name} is held already", rule="etcd-lock", help="release it before acquiring it again"
            )
        self.session.check()
        end = None if timeout is None else time.monotonic() + timeout
        self.key = f"{self.name}/{self.session.lease:016x}-{secrets.token_hex(8)}"
        try:
            put = put_op(self.key, b"", self.session.lease)
            own = self._store.txn([absent(self.key)], [put], token=self.key).revision
            while (before := self._predecessor(own)) is not None:
                if not self._await_deleted(before, end, while_waiting):
                    self.release()
                    return False
        except BaseException:
            with contextlib.suppress(EtcdError):  # the key goes with the lease; what led here matters more
                self.release()
            raise
        self.revision = own
        return True

    def release(self) -> None:
        """Gives the lock up. Does nothing if it is not held."""
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
