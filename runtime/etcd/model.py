"""The records of the store, and the questions to it: plain values, the same for real and simulated etcd.

Keys are `str`, values `bytes`. A revision is etcd's store-wide counter: each change gets the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from graphft.runtime.etcd.errors import EtcdError

MAX_TXN_OPS = 128  # etcd's default --max-txn-ops; it also bounds the number of compares


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
    """Keys in ascending order, and the store's revision when they were read. `more`: cut off by the limit."""

    kvs: tuple[KV, ...]
    revision: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one key. For a delete, `kv` has the deletion's revision and no value; `prev` is what was known."""

    kind: Literal["put", "delete"]
    kv: KV
    prev: KV | None = None


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Events in order; whole revisions. `revision` is the store's at sending (events may still lag behind it)."""

    revision: int
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction on one key. An absent key has revisions, version and lease 0, and no value."""

    key: str
    target: Literal["create", "mod", "version", "lease", "value"]
    op: Literal["=", "!=", "<", ">"]
    operand: int | bytes


@dataclass(frozen=True, slots=True)
class Op:
    """A step of a transaction; made by `put_op`, `get_op`, `range_op`, `delete_op` and `delete_prefix_op`."""

    kind: Literal["put", "get", "range", "delete", "delete-prefix"]
    key: str
    value: bytes = b""
    lease: int = 0
    limit: int = 0
    keys_only: bool = False


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`ok`: all compares held and `success` ran, else `failure` did. One response per op that ran:
    a `RangeResult` for get and range, the number of deleted keys for delete, None for put."""

    ok: bool
    revision: int
    responses: tuple[RangeResult | int | None, ...] = ()

    def range(self, index: int) -> RangeResult:
        """The response of the get or range op at `index`."""
        response = self.responses[index]
        if not isinstance(response, RangeResult):
            raise EtcdError(f"op {index} of the transaction read nothing", rule="etcd-txn")
        return response

    def kv(self, index: int) -> KV | None:
        """The key that the get op at `index` found."""
        kvs = self.range(index).kvs
        return kvs[0] if kvs else None


def absent(key: str) -> Compare:
    return Compare(key, "create", "=", 0)


def value_is(key: str, value: bytes) -> Compare:
    return Compare(key, "value", "=", value)


def mod_is(key: str, revision: int) -> Compare:
    """The key has not changed since `revision`, its mod_revision (0: it is absent)."""
    return Compare(key, "mod", "=", revision)


def create_is(key: str, revision: int) -> Compare:
    """The key is the same one, not deleted and made anew: the fence of a claim."""
    return Compare(key, "create", "=", revision)


def put_op(key: str, value: bytes, lease: int = 0) -> Op:
    return Op("put", key, value, lease)


def get_op(key: str) -> Op:
    return Op("get", key)


def range_op(prefix: str, *, limit: int = 0, keys_only: bool = False) -> Op:
    return Op("range", prefix, limit=limit, keys_only=keys_only)


def delete_op(key: str) -> Op:
    return Op("delete", key)


def delete_prefix_op(prefix: str) -> Op:
    """Its result is the number of keys deleted. Raises EtcdError for the prefix of all keys, the empty one."""
    if not prefix:
        raise EtcdError("delete_prefix('') would delete every key in etcd", rule="etcd-request", help="name a prefix")
    return Op("delete-prefix", prefix)


def check_txn(compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> None:
    """Refuse what etcd would: too many operations, or a key changed twice in one branch."""
    for name, part in (("compares", compare), ("success operations", success), ("failure operations", failure)):
        if len(part) > MAX_TXN_OPS:
            raise EtcdError(
                f"a transaction has {len(part)} {name}; etcd takes at most {MAX_TXN_OPS}",
                rule="etcd-txn",
                help="split it into several transactions",
            )
    for branch in (success, failure):
        changed = [op.key for op in branch if op.kind in ("put", "delete")]
        twice = next((key for key in changed if changed.count(key) > 1), None) if changed else None
        if twice is not None:
            raise EtcdError(
                f"a transaction changes {twice!r} twice; etcd takes one change per key",
                rule="etcd-txn",
                help="keep the last of the changes",
            )


# What a repeated transaction asks: given the answer `ok=False`, at which revision did an earlier try of mine apply?
Verify = Callable[[TxnResult], "int | None"]


def verify_by_token(token: str, success: Sequence[Op]) -> Verify:
    """Looks whether `token`, read by the last op of the failure branch, holds what `success` puts there."""
    put = next((op for op in success if op.kind == "put" and op.key == token), None)
    if put is None:
        raise EtcdError(
            f"the token {token!r} is not put by the transaction's success branch",
            rule="etcd-txn",
            help="name a key that the branch puts, with a value of this call's own",
        )
    mine = (put.value, put.lease)

    def verify(result: TxnResult) -> int | None:
        kv = result.kv(-1)
        return kv.mod_revision if kv is not None and (kv.value, kv.lease) == mine else None

    return verify


class WatchStream(Protocol):
    """One subscription. Iterating blocks; raises `StreamEnded` or `CompactedError`; ends quietly after `cancel`."""

    def __iter__(self) -> Iterator[WatchBatch]: ...

    def cancel(self) -> None: ...


class Transactions(Protocol):
    """The part of a store that reads and changes the queue's records."""

    def range(self, prefix: str, *, deadline: float | None = None) -> RangeResult: ...

    def txn(
        self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = (), *, token: str | None = None
    ) -> TxnResult: ...


class Store(Protocol):
    """The interface of both drivers, `Etcd` and `SimEtcd`. `Etcd` documents each method; times are seconds."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of the servers; none of a simulated one."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The same as they were given, with their schemes."""

    def ping(self, deadline: float = 3.0) -> None: ...

    def get(self, key: str, *, deadline: float | None = None) -> KV | None: ...

    def range(
        self, prefix: str, *, limit: int = 0, keys_only: bool = False, deadline: float | None = None
    ) -> RangeResult: ...

    def count(self, prefix: str, *, deadline: float | None = None) -> int: ...

    def put(self, key: str, value: bytes, lease: int = 0, *, deadline: float | None = None) -> int: ...

    def delete(self, key: str, *, deadline: float | None = None) -> int: ...

    def delete_prefix(self, prefix: str, *, deadline: float | None = None) -> int: ...

    def txn(
        self,
        compare: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        token: str | None = None,
        verify: Verify | None = None,
        deadline: float | None = None,
    ) -> TxnResult: ...

    def lease_grant(self, ttl: int, *, deadline: float | None = None) -> tuple[int, int]: ...

    def lease_keepalive_once(self, lease: int, *, deadline: float | None = None) -> int: ...

    def lease_revoke(self, lease: int, *, deadline: float | None = None) -> bool: ...

    def compact(self, revision: int, *, deadline: float | None = None) -> None: ...

    def is_full(self) -> bool: ...

    def watch(self, prefix: str, start_revision: int) -> WatchStream: ...

    def close(self) -> None: ...
