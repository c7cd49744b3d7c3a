"""The etcd client: python `etcd3`'s messages and stubs, with the retries, fail-over and clear outcomes that it lacks.

**What a failed call means.** Every method takes `deadline`, the seconds until it gives up (default: the client's).

| call | retried | `EtcdUnreachable` means | `Ambiguous` means |
| --- | --- | --- | --- |
| get, range, count | yes | nothing was read | never raised |
| put, delete, delete_prefix | yes | no try was answered: perhaps applied | never raised |
| lease_grant | yes | perhaps unused leases; they expire | never raised |
| lease_keepalive_once, lease_revoke | yes | unknown; own deadlines decide | never raised |
| txn without token or repeats | no | it was never sent | sent, outcome unknown |
| txn with token or repeats | yes, looks first | it was never sent | sent, and no later try was answered |

`put` and `delete` are therefore *at least once*: a repeated put can undo another writer's put in between. That is
right for keys with one writer; everything else belongs in a `txn` that compares what it relies on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

from graphft.runtime.etcd.channel import LEASE_HELP, Channel, etcdrpc
from graphft.runtime.etcd.model import (
    KV,
    Ambiguous,
    CompactedError,
    Compare,
    Event,
    LeaseLost,
    Op,
    RangeResult,
    StreamEnded,
    TxnResult,
    WatchBatch,
    applied_before,
    delete_prefix_op,
    get_op,
)
from graphft.runtime.process.interrupts import uninterrupted

# A member that is cut off from the majority ends the stream then, instead of staying silent.
LEADER_NEEDED = ("hasleader", "true")
TARGETS = {"create": ("CREATE", "create_revision"), "mod": ("MOD", "mod_revision"), "value": ("VALUE", "value")}


class Etcd(Channel):
    """A thread-safe client over one gRPC channel. `timeout` is per try, `deadline` per call, both in seconds.

    Opening one neither connects nor fails when etcd is away; `ping` does.
    """

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def get(self, key: str, *, deadline: float | None = None) -> KV | None:
        """Returns the key, or None. Linearizable, as all reads here."""
        kvs = self._range(etcdrpc.RangeRequest(key=key.encode()), deadline).kvs
        return _kv(kvs[0]) if kvs else None

    def range(self, prefix: str, *, keys_only: bool = False, deadline: float | None = None) -> RangeResult:
        """Returns all keys that start with `prefix` ("" = all keys), in ascending order."""
        answer = self._range(etcdrpc.RangeRequest(**_span(prefix), keys_only=keys_only), deadline)
        return _range_result(answer, answer.header.revision)

    def count(self, prefix: str, *, deadline: float | None = None) -> int:
        """Returns how many keys start with `prefix`. 7 ms at 100,000 keys: not for every step."""
        return int(self._range(etcdrpc.RangeRequest(**_span(prefix), count_only=True), deadline).count)

    def put(self, key: str, value: bytes, lease: int = 0, *, deadline: float | None = None) -> int:
        """Sets a key, at least once; returns the revision. `LeaseLost` when the lease does not exist."""
        request = etcdrpc.PutRequest(key=key.encode(), value=value, lease=lease)
        return int(self.repeat(self._kv.Put, request, deadline).header.revision)

    def delete(self, key: str, *, deadline: float | None = None) -> None:
        self.repeat(self._kv.DeleteRange, etcdrpc.DeleteRangeRequest(key=key.encode()), deadline)

    def delete_prefix(self, prefix: str, *, deadline: float | None = None) -> None:
        """Deletes all keys that start with `prefix`, which must not be empty."""
        request = etcdrpc.DeleteRangeRequest(**_span(delete_prefix_op(prefix).key))
        self.repeat(self._kv.DeleteRange, request, deadline)

    def grant(self, user: str, password: str, prefixes: Sequence[str]) -> None:
        """Makes a user, and a role of the same name, that may read and write the keys with these prefixes, and no
        others. One that is there gets this password. Needs the rights of root, once etcd wants a login."""

        def make(call: str, **fields: Any) -> Any:
            return self.repeat(getattr(self._auth, call), getattr(etcdrpc, f"Auth{call}Request")(**fields))

        if user not in make("RoleList").roles:
            make("RoleAdd", name=user)
        for prefix in prefixes:
            make("RoleGrantPermission", name=user, perm={"permType": "READWRITE", **_span(prefix)})
        known = user in make("UserList").users
        make("UserChangePassword" if known else "UserAdd", name=user, password=password)
        make("UserGrantRole", user=user, role=user)

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
        """Atomically: if all compares hold run `success`, else `failure`.

        `token` names a key that `success` puts, with a value that no other call puts (say, holder and attempt). It
        makes the call safe to repeat: the compares must fail once `success` has been applied, and a repeat that finds
        the token's value there reports ok=True, with the revision of the first try and no responses. `repeats`: it is
        safe without a token, as to apply it twice does no harm, or its caller asks no more of a failure.

        Outcomes: ok=True: applied, once. ok=False: the compares failed, and no earlier try's effect is (still) there.
        `EtcdUnreachable`: never sent. `Ambiguous`: sent, outcome unknown; even then the compares guard the state.
        """
        if token is not None:
            failure, repeats = (*failure, get_op(token)), True
        started, limit = time.monotonic(), self.deadline if deadline is None else deadline
        if self._suspect:  # so that nothing is sent, and hence nothing ambiguous, while etcd is away
            self.ping(limit)
        request = etcdrpc.TxnRequest(
            compare=[_compare(c) for c in compare],
            success=[_op(op) for op in success],
            failure=[_op(op) for op in failure],
        )
        tries = 0

        def call(timeout: float, wait: bool) -> Any:
            nonlocal tries
            tries += 1
            return self.once(self._kv.Txn, request, timeout, wait=wait)

        left = started + limit - time.monotonic()
        answer = self.attempt(call, request, left, repeats=repeats, silent=self._ambiguous)
        revision = answer.header.revision
        result = TxnResult(answer.succeeded, revision, tuple(_response(r, revision) for r in answer.responses))
        if result.ok or token is None:
            return result
        applied = applied_before(token, success, result) if tries > 1 else None
        return TxnResult(False, revision, result.responses[:-1]) if applied is None else TxnResult(True, applied)

    def lease_grant(self, ttl: int, *, deadline: float | None = None) -> tuple[int, int]:
        """Returns (id, granted TTL in seconds) of a new lease. etcd grants more than asked below its least TTL."""
        answer = self.repeat(self._lease.LeaseGrant, etcdrpc.LeaseGrantRequest(TTL=ttl), deadline)
        return answer.ID, answer.TTL

    def lease_keepalive_once(self, lease: int, *, deadline: float | None = None) -> int:
        """Renews a lease; returns its TTL in seconds. `LeaseLost` when it has expired (etcd answers TTL 0)."""

        def renew(request: Any, **rest: Any) -> Any:
            return next(self._lease.LeaseKeepAlive(iter([request]), **rest), None)

        def call(timeout: float, wait: bool) -> int:
            answer = self.once(renew, request, timeout, wait=wait)
            if answer is None:
                raise StreamEnded("etcd ended the stream of a lease's renewals", rule="etcd-lease")
            return int(answer.TTL)

        request = etcdrpc.LeaseKeepAliveRequest(ID=lease)
        ttl: int = self.attempt(call, request, deadline)
        if ttl <= 0:
            raise LeaseLost(f"lease {lease:x} has expired", rule="etcd-lease", help=LEASE_HELP)
        return ttl

    def lease_revoke(self, lease: int, *, deadline: float | None = None) -> None:
        """Ends a lease and deletes its keys; does nothing when it had ended already."""
        with contextlib.suppress(LeaseLost):
            self.repeat(self._lease.LeaseRevoke, etcdrpc.LeaseRevokeRequest(ID=lease), deadline)

    def watch(self, prefix: str, start_revision: int) -> EtcdStream:
        """Subscribes to changes from `start_revision` on. One stream, no retries: `Watch` adds them."""
        return EtcdStream(self, self._watch.Watch, prefix, start_revision)

    def _range(self, request: Any, deadline: float | None) -> Any:
        return self.repeat(self._kv.Range, request, deadline)

    def _ambiguous(self, seconds: float, tries: int, error: grpc.RpcError) -> Ambiguous:
        return Ambiguous(
            f"a write was sent to etcd at {', '.join(self.endpoints)}, and no answer came in {seconds:.1f} s "
            f"({error.code().name}, {error.details()}): it may or may not have been applied",
            rule="etcd-ambiguous",
            help="read the keys again and decide, or give the transaction a token",
        )


def open_etcd(endpoints: Sequence[str], environ: Mapping[str, str] = os.environ) -> Etcd:
    """Returns a client that has not connected yet.

    User, password and the files of TLS come from GRAPHFT_ETCD_USER, _PASSWORD, _CA, _CERT and _KEY (not from a command
    line, which everybody on the machine can read).
    """
    user, password, ca, cert, key = (
        environ.get(f"GRAPHFT_ETCD_{name}") or None for name in ("USER", "PASSWORD", "CA", "CERT", "KEY")
    )
    return Etcd(endpoints, user, password, ca_cert=ca, cert_cert=cert, cert_key=key)


class EtcdStream:
    """A `WatchStream`. The first batch holds no events: it says that the watch stands, and the store's revision."""

    def __init__(self, channel: Channel, method: Any, prefix: str, start_revision: int) -> None:
        self._cancelled = threading.Event()
        create = etcdrpc.WatchCreateRequest(**_span(prefix), start_revision=start_revision, progress_notify=True)
        try:
            self._call = channel.logged_in(
                lambda metadata: method(self._requests(create), metadata=(*metadata, LEADER_NEEDED)), channel.timeout
            )
        except grpc.RpcError as e:  # of the login
            raise _ended(e) from None

    @uninterrupted()
    def cancel(self) -> None:
        """Ends the stream, from any thread."""
        self._cancelled.set()
        self._call.cancel()

    def __iter__(self) -> Iterator[WatchBatch]:
        try:
            for message in self._call:
                if message.compact_revision:
                    raise CompactedError("the watched revision has been compacted", message.compact_revision)
                if message.canceled:
                    raise StreamEnded(f"etcd ended the watch: {message.cancel_reason}", rule="etcd-watch")
                events = (Event("delete" if e.type == 1 else "put", _kv(e.kv)) for e in message.events)
                yield WatchBatch(message.header.revision, tuple(events))
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
    return StreamEnded(f"the watch ended: {error.details()} ({error.code().name})", rule="etcd-watch")


# -- messages ---------------------------------------------------------------------------------------------------------


def _span(prefix: str) -> dict[str, bytes]:
    """Returns `key` and `range_end` of all keys that start with `prefix`; of all keys when it is empty."""
    start = prefix.encode()
    head = start.rstrip(b"\xff")
    end = head[:-1] + bytes([head[-1] + 1]) if head else b"\0"
    return {"key": start or b"\0", "range_end": end}


def _kv(message: Any) -> KV:
    return KV(
        message.key.decode(),
        message.value,
        message.create_revision,
        message.mod_revision,
        message.version,
        message.lease,
    )


def _range_result(message: Any, revision: int) -> RangeResult:
    return RangeResult(tuple(_kv(kv) for kv in message.kvs), revision)


def _compare(compare: Compare) -> Any:
    target, field = TARGETS[compare.target]
    return etcdrpc.Compare(key=compare.key.encode(), target=target, result="EQUAL", **{field: compare.operand})


def _op(op: Op) -> Any:
    one, span = {"key": op.key.encode()}, _span(op.key)
    if op.kind == "put":
        return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(**one, value=op.value, lease=op.lease))
    if op.kind in ("delete", "delete-prefix"):
        keys = one if op.kind == "delete" else span
        return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(**keys))
    keys = one if op.kind == "get" else span
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(**keys, keys_only=op.keys_only))


def _response(message: Any, revision: int) -> RangeResult | int | None:
    kind = message.WhichOneof("response")
    if kind == "response_range":
        return _range_result(message.response_range, revision)
    return message.response_delete_range.deleted if kind == "response_delete_range" else None
