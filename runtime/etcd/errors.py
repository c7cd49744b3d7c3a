"""Errors of the etcd layer. Each says what was tried, for how long, and what to do."""

from __future__ import annotations

from graphft.errors import GraphftError


class EtcdError(GraphftError):
    """etcd refused a request, or this layer cannot go on. Base of the errors below."""


class EtcdUnreachable(EtcdError):
    """No endpoint answered in time, and nothing was changed: a read, or a write that was never sent."""


class Ambiguous(EtcdError):
    """A write was sent and no answer came: it may have been applied, may not, or may still be.

    Read the keys again and decide; or repeat the call with a `token` (see `Etcd.txn`), which decides by itself.
    """


class LeaseLost(EtcdError):
    """The lease has expired, was revoked, or can no longer be known to be alive. What it protected is gone."""


class CompactedError(EtcdError):
    """A revision that etcd has already compacted away was asked for. `compact_revision` is the oldest one kept."""

    def __init__(self, message: str, compact_revision: int) -> None:
        self.compact_revision = compact_revision
        super().__init__(message, rule="etcd-compacted", help="list the keys again and watch from that revision")


class StreamEnded(EtcdError):
    """A watch stream ended (server gone, leader lost). Open a new one from the last revision seen."""
