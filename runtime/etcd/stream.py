"""One watch stream of the real etcd."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from graphft.runtime.etcd import convert
from graphft.runtime.etcd.calls import Calls
from graphft.runtime.etcd.errors import CompactedError, StreamEnded
from graphft.runtime.etcd.model import WatchBatch
from graphft.runtime.etcd.shim import etcdrpc
from graphft.runtime.process.interrupts import uninterrupted

# A member that is cut off from the majority ends the stream then, instead of staying silent.
LEADER_NEEDED = ("hasleader", "true")


class EtcdStream:
    """A `WatchStream`. The first batch holds no events: it says that the watch stands, and the store's revision."""

    def __init__(self, client: Calls, prefix: str, start_revision: int) -> None:
        self._cancelled = threading.Event()
        create = etcdrpc.WatchCreateRequest(
            **convert.prefix_span(prefix), start_revision=start_revision, progress_notify=True
        )
        try:
            self._call = client.logged_in(
                lambda metadata: client.watch.Watch(self._requests(create), metadata=(*metadata, LEADER_NEEDED)),
                client.timeout,
            )
        except grpc.RpcError as e:  # of the login
            raise _ended(e) from None

    @uninterrupted()
    def cancel(self) -> None:
        """End the stream, from any thread."""
        self._cancelled.set()
        self._call.cancel()

    def __iter__(self) -> Iterator[WatchBatch]:
        try:
            for message in self._call:
                if message.canceled:
                    raise _refused(message)
                yield WatchBatch(message.header.revision, tuple(map(convert.event_of, message.events)))
        except grpc.RpcError as e:
            if self._cancelled.is_set():
                return
            raise _ended(e) from None
        finally:
            self.cancel()

    def _requests(self, create: Any) -> Iterator[Any]:
        yield etcdrpc.WatchRequest(create_request=create)
        self._cancelled.wait()  # the stream lives for as long as its requests have not ended


def _ended(error: grpc.RpcError) -> StreamEnded:
    said = f"the watch ended: {error.details()} ({error.code().name})"
    return StreamEnded(said, rule="etcd-watch", help="open it again")


def _refused(message: Any) -> StreamEnded | CompactedError:
    if message.compact_revision:
        return CompactedError("the watched revision has been compacted", message.compact_revision)
    return StreamEnded(f"etcd ended the watch: {message.cancel_reason}", rule="etcd-watch", help="open it again")
