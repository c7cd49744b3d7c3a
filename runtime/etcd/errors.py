"""Errors of the etcd layer. Each says what was tried, for how long, and what to do."""

from __future__ import annotations

from graphft.errors import GraphftError, UsageError
from graphft.runtime.process.role_process import EXIT_LEASE_LOST


class EtcdError(GraphftError):
    """etcd refused a request, or this layer cannot go on. Base of the errors below.

    An error that is no `TransientEtcdError` is for good: the same request is refused again, however often it is made.
    """


class EtcdUsageError(EtcdError, UsageError):
    """Nothing but another configuration helps: endpoints, login, certificates, or the installed etcd are wrong."""


class TransientEtcdError(EtcdError):
    """An error that may pass: the same request may succeed later, so that a caller that looks before it changes repeats
    it."""

    exit_status = EXIT_LEASE_LOST


class EtcdUnreachable(TransientEtcdError):
    """No endpoint answered in time, and nothing was changed: a read, or a write that was never sent."""


class Ambiguous(TransientEtcdError):
    """A write was sent and no answer came: it may have been applied, may not, or may still be.

    Read the keys again and decide; or repeat the call with a `token` (see `Etcd.txn`), which decides by itself.
    """


class LeaseLost(EtcdError):
    """The lease has expired, was revoked, or can no longer be known to be alive. What it protected is gone."""

    exit_status = EXIT_LEASE_LOST


class CompactedError(EtcdError):
    """A revision that etcd has already compacted away was asked for. `compact_revision` is the oldest one kept."""

    def __init__(self, message: str, compact_revision: int) -> None:
        self.compact_revision = compact_revision
        super().__init__(message, rule="etcd-compacted", help="list the keys again and watch from that revision")


class StreamEnded(TransientEtcdError):
    """A watch stream ended (server gone, leader lost). Open a new one from the last revision seen."""


class EtcdFull(TransientEtcdError):
    """etcd takes no writes: its quota is used up. Reads, deletes and renewals of leases go on."""


class EtcdBusy(TransientEtcdError):
    """etcd refused the request for now: too many at once, or a login that ended this moment."""
