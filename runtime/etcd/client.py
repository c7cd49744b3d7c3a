"""The etcd client: python `etcd3`'s messages and stubs, with the retries, fail-over and clear outcomes that it lacks.

**What a failed call means.** Every method takes `deadline`, the seconds until it gives up (default: the client's).

| call | retried | `EtcdUnreachable` means | `Ambiguous` means |
| --- | --- | --- | --- |
| get, range, count, status, members | yes | nothing was read | never raised |
| put, delete, delete_prefix, compact | yes | no try was answered: perhaps applied | never raised |
| lease_grant | yes, with the same id | perhaps an unused lease; it expires | never raised |
| lease_keepalive_once, lease_revoke | yes | unknown; own deadlines decide | never raised |
| txn without token or verify | no | it was never sent | sent, outcome unknown |
| txn with token or verify | yes, looks first | it was never sent | sent, and no later try was answered |

`put` and `delete` are therefore *at least once*: a repeated put can undo another writer's put in between. That is
right for keys with one writer; everything else belongs in a `txn` that compares what it relies on.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from graphft.runtime.etcd import messages
from graphft.runtime.etcd.channel import FIRST_PAUSE, LAST_PAUSE, LEASE_HELP, NO_ANSWER, Calls
from graphft.runtime.etcd.errors import CompactedError, LeaseLost, StreamEnded
from graphft.runtime.etcd.messages import etcdrpc
from graphft.runtime.etcd.model import (
    KV,
    Compare,
    Op,
    RangeResult,
    TxnResult,
    Verify,
    WatchBatch,
    check_txn,
    delete_prefix_op,
    get_op,
    verify_by_token,
)
from graphft.runtime.process.interrupts import uninterrupted

# A member that is cut off from the majority ends the stream then, instead of staying silent.
LEADER_NEEDED = ("hasleader", "true")


@dataclass(frozen=True, slots=True)
class Status:
    """The status of one member, as it says. Ids are etcd's; `db_size` in bytes."""

    version: str
    member: int
    leader: int
    revision: int
    db_size: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the cluster. The name is empty until it has started once."""

    id: int
    name: str
    client_urls: tuple[str, ...]


class Etcd:
    """A thread-safe client over one gRPC channel. `timeout` is per try, `deadline` per call, both in seconds.

    Opening one neither connects nor fails when etcd is away; `ping` does.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        user: str | None = None,
        password: str | None = None,
        ca_cert: str | None = None,
        cert_key: str | None = None,
        cert_cert: str | None = None,
        timeout: float = 1.0,
        deadline: float = 10.0,
    ) -> None:
        self._calls = Calls(endpoints, user, password, ca_cert, cert_key, cert_cert, timeout, deadline)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._calls.endpoints

    @property
    def urls(self) -> tuple[str, ...]:
        """The endpoints as they were given, with their schemes."""
        return self._calls.urls

    def __repr__(self) -> str:
        return f"Etcd({', '.join(self.endpoints)})"

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; calls and watches in progress end with an error."""
        self._calls.close()

    def ping(self, deadline: float = 3.0) -> None:
        """Return when a majority answers; `EtcdUnreachable` when none did in `deadline` seconds."""
        self._calls.probe(deadline)

    def get(self, key: str, *, deadline: float | None = None) -> KV | None:
        """The key, or None. Linearizable, as all reads here."""
        kvs = self._range(etcdrpc.RangeRequest(key=key.encode()), deadline).kvs
        return messages.kv_of(kvs[0]) if kvs else None

    def range(
        self, prefix: str, *, limit: int = 0, keys_only: bool = False, deadline: float | None = None
    ) -> RangeResult:
        """All keys that start with `prefix` ("" = all keys), in ascending order; at most `limit` unless 0."""
        answer = self._range(messages.range_request(prefix, limit, keys_only), deadline)
        return messages.range_of(answer, answer.header.revision)

    def count(self, prefix: str, *, deadline: float | None = None) -> int:
        """Returns how many keys start with `prefix`. 7 ms at 100,000 keys: not for every step."""
        return self._range(messages.range_request(prefix, 0, False, count_only=True), deadline).count

    def put(self, key: str, value: bytes, lease: int = 0, *, deadline: float | None = None) -> int:
        """Set a key, at least once; returns the revision. `LeaseLost` when the lease does not exist."""
        request = etcdrpc.PutRequest(key=key.encode(), value=value, lease=lease)
        return self._calls.repeat(self._calls.kv.Put, request, deadline).header.revision

    def delete(self, key: str, *, deadline: float | None = None) -> int:
        """Delete a key; returns how many were deleted by the try that was answered."""
        return self._delete(etcdrpc.DeleteRangeRequest(key=key.encode()), deadline)

    def delete_prefix(self, prefix: str, *, deadline: float | None = None) -> int:
        """Delete all keys that start with `prefix`, which must not be empty."""
        return self._delete(etcdrpc.DeleteRangeRequest(**messages.prefix_span(delete_prefix_op(prefix).key)), deadline)

    def txn(
        self,
        compare: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        token: str | None = None,
        verify: Verify | None = None,
        deadline: float | None = None,
    ) -> TxnResult:
        """Atomically: if all compares hold run `success`, else `failure`.

        `token` names a key that `success` puts, with a value that no other call puts (say, holder and attempt). It
        makes the call safe to repeat: the compares must fail once `success` has been applied, and a repeat that finds
        the token's value there reports ok=True, with the revision of the first try and no responses. `verify` is the
        general form: called with the failed result of a repeat, it returns the revision at which an earlier try was
        applied, or None.

        Outcomes: ok=True: applied, once. ok=False: the compares failed, and no earlier try's effect is (still) there.
        `EtcdUnreachable`: never sent. `Ambiguous`: sent, outcome unknown; even then the compares guard the state.
        """
        check_txn(compare, success, failure)
        if token is not None:
            failure = (*failure, get_op(token))
            verify = verify_by_token(token, success)
        started = time.monotonic()
        limit = self._calls.deadline if deadline is None else deadline
        if self._calls.suspect:  # so that nothing is sent, and hence nothing ambiguous, while etcd is away
            self._calls.probe(limit)
        answer, tries = self._send_txn(messages.txn_request(compare, success, failure), verify, started, limit)
        result = messages.txn_result(answer)
        if result.ok:
            return result
        applied = verify(result) if verify and tries > 1 else None
        if applied is not None:
            return TxnResult(True, applied)
        return TxnResult(False, result.revision, result.responses[:-1]) if token is not None else result

    def lease_grant(self, ttl: int, *, deadline: float | None = None) -> tuple[int, int]:
        """A new lease: (id, granted TTL in seconds). etcd grants more than asked below its least TTL."""
        request = etcdrpc.LeaseGrantRequest(TTL=ttl, ID=secrets.randbits(62) + 1)
        tries = 0

        def call(timeout: float) -> tuple[int, int]:
            nonlocal tries
            tries += 1
            try:
                answer = self._calls.once(self._calls.lease.LeaseGrant, request, timeout)
            except grpc.RpcError as e:
                if tries > 1 and e.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    return request.ID, ttl  # it exists: an earlier try was applied
                raise
            return answer.ID, answer.TTL

        lease, granted = self._calls.attempt(call, deadline, request)
        return lease, granted

    def lease_keepalive_once(self, lease: int, *, deadline: float | None = None) -> int:
        """Renew a lease; returns its TTL in seconds. `LeaseLost` when it has expired (etcd answers TTL 0)."""

        def call(timeout: float) -> int:
            method = self._calls.lease.LeaseKeepAlive
            answer = self._calls.logged_in(
                lambda metadata: next(method(iter([request]), timeout=timeout, metadata=metadata), None), timeout
            )
            if answer is None:
                raise StreamEnded("etcd ended the stream of a lease's renewals", rule="etcd-lease")
            return answer.TTL

        request = etcdrpc.LeaseKeepAliveRequest(ID=lease)
        ttl: int = self._calls.attempt(call, deadline, request)
        if ttl <= 0:
            raise LeaseLost(f"lease {lease:x} has expired", rule="etcd-lease", help=LEASE_HELP)
        return ttl

    def lease_revoke(self, lease: int, *, deadline: float | None = None) -> bool:
        """End a lease and delete its keys; False when it had ended already."""
        try:
            self._calls.repeat(self._calls.lease.LeaseRevoke, etcdrpc.LeaseRevokeRequest(ID=lease), deadline)
        except LeaseLost:
            return False
        return True

    def compact(self, revision: int, *, deadline: float | None = None) -> None:
        """Forget the history before `revision`; then its space is free for what comes, or for a defragmentation.
        `CompactedError` when that is done already, or lies ahead. One try, of a minute by default: some 100,000
        changes take etcd a second."""
        request = etcdrpc.CompactionRequest(revision=revision, physical=True)  # else it is done some time later
        self._calls.single(self._calls.kv.Compact, request, 60.0 if deadline is None else deadline)

    def is_full(self) -> bool:
        """True if its quota is used up, and it takes no records. False if it does not answer."""
        return self._calls.has_alarm()

    def status(self, *, deadline: float | None = None) -> Status:
        """Asks one member of itself: whichever answers; the only one, with one endpoint."""
        s = self._calls.repeat(self._calls.maintenance.Status, etcdrpc.StatusRequest(), deadline)
        return Status(s.version, s.header.member_id, s.leader, s.header.revision, s.dbSize)

    def members(self, *, deadline: float | None = None) -> tuple[Member, ...]:
        answer = self._calls.repeat(self._calls.cluster.MemberList, etcdrpc.MemberListRequest(), deadline)
        return tuple(Member(m.ID, m.name, tuple(m.clientURLs)) for m in answer.members)

    def watch(self, prefix: str, start_revision: int) -> EtcdStream:
        """Subscribe to changes from `start_revision` on. One stream, no retries: `Watch` adds them."""
        return EtcdStream(self._calls, prefix, start_revision)

    def _range(self, request: Any, deadline: float | None) -> Any:
        return self._calls.repeat(self._calls.kv.Range, request, deadline)

    def _delete(self, request: Any, deadline: float | None) -> int:
        return self._calls.repeat(self._calls.kv.DeleteRange, request, deadline).deleted

    def _send_txn(self, request: Any, verify: Verify | None, started: float, limit: float) -> tuple[Any, int]:
        """The answer and the number of tries."""
        pause, tries = FIRST_PAUSE, 0
        while True:
            left = max(0.01, started + limit - time.monotonic())
            tries += 1
            try:
                if verify is None:  # one try only: let it wait for a connection, and for its answer
                    return self._calls.once(self._calls.kv.Txn, request, left, wait=True), tries
                return self._calls.once(self._calls.kv.Txn, request, min(left, self._calls.timeout)), tries
            except grpc.RpcError as e:
                if e.code() not in NO_ANSWER:
                    raise self._calls.refused(e, request) from None
                passed = time.monotonic() - started
                if verify is None or passed + pause >= limit:
                    raise self._calls.ambiguous(passed, e) from None
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)


def open_etcd(endpoints: Sequence[str], environ: Mapping[str, str] = os.environ) -> Etcd:
    """A client that has not connected yet.

    User, password and the files of TLS come from GRAPHFT_ETCD_USER, _PASSWORD, _CA, _CERT and _KEY (not from a command
    line, which everybody on the machine can read).
    """
    user, password, ca, cert, key = (
        environ.get(f"GRAPHFT_ETCD_{name}") or None for name in ("USER", "PASSWORD", "CA", "CERT", "KEY")
    )
    return Etcd(endpoints, user, password, ca_cert=ca, cert_cert=cert, cert_key=key)


class EtcdStream:
    """A `WatchStream`. The first batch holds no events: it says that the watch stands, and the store's revision."""

    def __init__(self, client: Calls, prefix: str, start_revision: int) -> None:
        self._cancelled = threading.Event()
        create = etcdrpc.WatchCreateRequest(
            **messages.prefix_span(prefix), start_revision=start_revision, progress_notify=True
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
                yield WatchBatch(message.header.revision, tuple(map(messages.event_of, message.events)))
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
