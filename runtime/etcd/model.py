"""The values of the store, its errors, and the interface that the real and the simulated etcd have.

Keys are `str`, values `bytes`. A revision is etcd's store-wide counter: each change gets the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from graphft.errors import GraphftError, UsageError
from graphft.runtime.process.role_process import EXIT_LEASE_LOST

MAX_TXN_OPS = 128  # etcd's default --max-txn-ops; it also bounds the number of compares. etcd refuses more


class EtcdError(GraphftError):
    """etcd refused a request, or this layer cannot go on. Base of the errors below.

    An error that is no `TransientEtcdError` is for good: the same request is refused again, however often it is made.
    """


class EtcdUsageError(EtcdError, UsageError):
    """Only another configuration helps: endpoints, login, certificates, or the installed etcd are wrong."""


class TransientEtcdError(EtcdError):
    """An error that may pass: a caller that looks before it changes repeats the request."""

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


@dataclass(frozen=True, slots=True)
class KV:
    """A key with its value and history. `version` counts changes since creation; `lease` is 0 without one."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys in ascending order, and the store's revision when they were read."""

    kvs: tuple[KV, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one key. For a delete, `kv` has the deletion's revision and no value."""

    kind: Literal["put", "delete"]
    kv: KV


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Events in order; whole revisions. `revision` is the store's at sending (events may still lag behind it)."""

    revision: int
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction: this is so of the key. An absent key has revisions 0, and no value."""

    key: str
    target: Literal["create", "mod", "value"]
    operand: int | bytes


@dataclass(frozen=True, slots=True)
class Op:
    """A step of a transaction; made by `put_op`, `get_op`, `range_op`, `delete_op` and `delete_prefix_op`."""

    kind: Literal["put", "get", "range", "delete", "delete-prefix"]
    key: str
    value: bytes = b""
    lease: int = 0
    keys_only: bool = False


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`ok`: all compares held and `success` ran, else `failure` did. One response per op that ran:
    a `RangeResult` for get and range, the number of deleted keys for delete, None for put."""

    ok: bool
    revision: int
    responses: tuple[RangeResult | int | None, ...] = ()

    def range(self, index: int) -> RangeResult:
        """Returns the response of the get or range op at `index`."""
        response = self.responses[index]
        if not isinstance(response, RangeResult):
            raise EtcdError(f"op {index} of the transaction read nothing", rule="etcd-txn")
        return response

    def kv(self, index: int) -> KV | None:
        """Returns the key that the get op at `index` found."""
        kvs = self.range(index).kvs
        return kvs[0] if kvs else None


def absent(key: str) -> Compare:
    return Compare(key, "create", 0)


def value_is(key: str, value: bytes) -> Compare:
    return Compare(key, "value", value)


def mod_is(key: str, revision: int) -> Compare:
    """The key has not changed since `revision`, its mod_revision (0: it is absent)."""
    return Compare(key, "mod", revision)


def create_is(key: str, revision: int) -> Compare:
    """The key is the same one, not deleted and made anew: the fence of a claim."""
    return Compare(key, "create", revision)


def put_op(key: str, value: bytes, lease: int = 0) -> Op:
    return Op("put", key, value, lease)


def get_op(key: str) -> Op:
    return Op("get", key)


def range_op(prefix: str, *, keys_only: bool = False) -> Op:
    return Op("range", prefix, keys_only=keys_only)


def delete_op(key: str) -> Op:
    return Op("delete", key)


def delete_prefix_op(prefix: str) -> Op:
    """Its result is the number of keys deleted. Raises EtcdError for the prefix of all keys, the empty one."""
    if not prefix:
        raise EtcdError("delete_prefix('') would delete every key in etcd", rule="etcd-request", help="name a prefix")
    return Op("delete-prefix", prefix)


def applied_before(token: str, success: Sequence[Op], failed: TxnResult) -> int | None:
    """Returns the revision at which an earlier try was applied: `token`, which the last op of the failure branch has
    read, holds what `success` puts there. None: it does not."""
    put, kv = next(op for op in success if op.kind == "put" and op.key == token), failed.kv(-1)
    return kv.mod_revision if kv is not None and (kv.value, kv.lease) == (put.value, put.lease) else None


class WatchStream(Protocol):
    """One subscription. Iterating blocks; raises `StreamEnded` or `CompactedError`; ends quietly after `cancel`."""

    def __iter__(self) -> Iterator[WatchBatch]: ...

    def cancel(self) -> None: ...


class Store(Protocol):
    """The interface of both drivers, `Etcd` and the simulated one. `Etcd` documents each method; times are seconds."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of the servers; none of a simulated one."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The same as they were given, with their schemes."""

    def ping(self, deadline: float = 3.0) -> None: ...

    def get(self, key: str, *, deadline: float | None = None) -> KV | None: ...

    def range(self, prefix: str, *, keys_only: bool = False, deadline: float | None = None) -> RangeResult: ...

    def count(self, prefix: str, *, deadline: float | None = None) -> int: ...

    def put(self, key: str, value: bytes, lease: int = 0, *, deadline: float | None = None) -> int: ...

    def delete(self, key: str, *, deadline: float | None = None) -> None: ...

    def delete_prefix(self, prefix: str, *, deadline: float | None = None) -> None: ...

    def txn(
        self,
        compare: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        token: str | None = None,
        repeats: bool = False,
        deadline: float | None = None,
    ) -> TxnResult: ...

    def lease_grant(self, ttl: int, *, deadline: float | None = None) -> tuple[int, int]: ...

    def lease_keepalive_once(self, lease: int, *, deadline: float | None = None) -> int: ...

    def lease_revoke(self, lease: int, *, deadline: float | None = None) -> None: ...

    def is_full(self) -> bool: ...

    def watch(self, prefix: str, start_revision: int) -> WatchStream: ...

    def close(self) -> None: ...
