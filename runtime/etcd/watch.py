"""A watch that lasts: over server restarts, lost leaders, compaction and long disconnects."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from graphft.runtime.etcd.model import (
    KV,
    CompactedError,
    EtcdError,
    RangeResult,
    Store,
    TransientEtcdError,
    WatchBatch,
    WatchStream,
)

T = TypeVar("T")
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0  # seconds between tries while etcd is away
LIST = 2.0  # seconds until a list on the watch's thread gives up (and looks whether to close)


@dataclass(slots=True)
class View:
    """A prefix of the store as of `revision`. Pure: no threads, no I/O, no clock.

    Both methods return True if that has changed any key.
    """

    kvs: dict[str, KV] = field(default_factory=dict)
    revision: int = 0

    def relist(self, listed: RangeResult) -> bool:
        """Replaces the state by a full list of the prefix."""
        before, self.kvs = self.kvs, {kv.key: kv for kv in listed.kvs}
        self.revision = listed.revision
        return self.kvs != before  # by more than a revision: a store that was restored gives revisions again

    def apply(self, batch: WatchBatch) -> bool:
        """Applies a watch's events; those that the state holds already are left out."""
        new = [event for event in batch.events if event.kv.mod_revision > self.revision]
        for event in new:
            if event.kind == "put":
                self.kvs[event.kv.key] = event.kv
            else:
                self.kvs.pop(event.kv.key, None)
            self.revision = event.kv.mod_revision
        return bool(new)


class Watch:
    """Keeps a view of all keys under `prefix`, on a thread of its own.

    The constructor lists the prefix (`EtcdUnreachable` when it cannot); from then on the thread follows every change,
    in order. `on_change` is called when keys have changed, and must not block. When the stream ends, the prefix is
    listed anew (etcd may have been restored from a backup). So the view misses nothing that lasts. An exception in
    `on_change` ends the watch, and shows in `snapshot` and `wait`.
    """

    def __init__(self, store: Store, prefix: str, on_change: Callable[[], object] = bool) -> None:
        self.prefix = prefix
        self._store, self._on_change = store, on_change
        self._view = View()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._stream: WatchStream | None = None
        self._failure: BaseException | None = None
        self.connected = False
        """True while a stream stands; while False, the view may be behind."""
        self._relist()
        self._thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def revision(self) -> int:
        """Returns the revision up to which the view holds everything."""
        return self._view.revision

    def snapshot(self) -> dict[str, KV]:
        """Returns a copy of the view."""
        with self._changed:
            self._check()
            return dict(self._view.kvs)

    def wait(self, predicate: Callable[[Mapping[str, KV]], T], timeout: float | None = None) -> T | None:
        """Blocks until `predicate(view)` is true and returns its value; None after `timeout` seconds.

        The predicate runs under the view's lock, at once and after each change: keep it short.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._check()
                value = predicate(MappingProxyType(self._view.kvs))
                if value:
                    return value
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def close(self) -> None:
        """Ends the watch and joins its thread, at once, or within two seconds if etcd is away. Waiters get an error."""
        self._closed.set()
        with self._changed:
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise EtcdError(
                f"the watch of {self.prefix!r} ended: {self._failure!r}", rule="etcd-watch"
            ) from self._failure
        if self._closed.is_set():
            raise EtcdError(f"the watch of {self.prefix!r} is closed", rule="etcd-watch")

    def _run(self) -> None:
        try:
            pause = FIRST_PAUSE
            self._follow()
            while True:
                pause = FIRST_PAUSE if self.connected else min(2 * pause, LAST_PAUSE)
                self.connected = False
                if self._closed.wait(pause):
                    return
                with contextlib.suppress(TransientEtcdError):
                    self._relist(LIST)
                    self._follow()
        except BaseException as e:  # raised to the next reader of the view; a dead thread must not go unnoticed
            with self._changed:
                self._failure = e
                self._changed.notify_all()
        finally:
            self.connected = False

    def _follow(self) -> None:
        """Reads one stream until it ends."""
        with contextlib.suppress(TransientEtcdError, CompactedError):
            stream = self._store.watch(self.prefix, self._view.revision + 1)
            with self._changed:
                self._stream = stream
            if self._closed.is_set():
                stream.cancel()
            try:
                for batch in stream:
                    if batch.revision < self._view.revision:  # a member lags, or the store was restored from a backup
                        return
                    self.connected = True
                    self._take_in(batch)
            finally:
                stream.cancel()

    def _relist(self, deadline: float | None = None) -> None:
        self._take_in(self._store.range(self.prefix, deadline=deadline))

    def _take_in(self, new: RangeResult | WatchBatch) -> None:
        with self._changed:
            changed = self._view.relist(new) if isinstance(new, RangeResult) else self._view.apply(new)
            self._changed.notify_all()
        if changed:
            self._on_change()
