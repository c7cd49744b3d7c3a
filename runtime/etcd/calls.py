"""One gRPC channel to etcd with time-outs, retries, fail-over and login. `Etcd` builds its methods on it.

What may be retried is decided by status code alone:

* UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, INTERNAL, UNKNOWN, ABORTED: no answer. The request may have been applied.
* UNAUTHENTICATED, INVALID_ARGUMENT with a login: refused before anything was done; log in again once (tokens end with
  the server's memory, after some minutes, and when users are changed).
* RESOURCE_EXHAUSTED: refused; the quota is used up, or etcd is busy, or the request is too large (`_exhausted`).
* everything else: refused for good, nothing was changed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from graphft.runtime.etcd.channel import open_channel, parse_endpoint
from graphft.runtime.etcd.convert import describe
from graphft.runtime.etcd.errors import (
    Ambiguous,
    CompactedError,
    EtcdBusy,
    EtcdError,
    EtcdFull,
    EtcdUnreachable,
    EtcdUsageError,
    LeaseLost,
)
from graphft.runtime.etcd.shim import etcdrpc
from graphft.runtime.process.interrupts import uninterrupted

Code = grpc.StatusCode
NO_ANSWER = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN, Code.ABORTED}
Metadata = tuple[tuple[str, str], ...]
FIRST_PAUSE, LAST_PAUSE = 0.02, 0.25  # seconds between tries
LEAST_LIMIT = 512 << 10
"""Bytes: what etcd's gRPC takes beyond its own limit of a request. What is refused there as too large is larger."""
ALARM_SECONDS = 1.0
FOLLOW_SECONDS, LIST_SECONDS = 3.0, 1.0
"""Between two looks at who the members are, and for how long one may take."""
LEASE_HELP = (
    "the holder was silent for longer than its TTL, or somebody revoked it; stop, and start anew with a new lease"
)
FULL_HELP = (
    "compact it, defragment, disarm the alarm (etcdctl compact --physical, defrag, alarm disarm), or start it with a "
    "larger --quota-backend-bytes"
)


class _Service:
    """A service's methods, of whatever channel is in use when one is called: a call that is made again after a move
    goes to the members that are asked by then, and never to a channel that was closed. `check` raises when the client
    is closed, which another thread may do at any moment."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.stub: Any = None
        self._check = check

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            while True:
                stub = self.stub
                try:
                    return getattr(stub, name)(*arguments, **options)
                except ValueError:  # that channel is closed
                    self._check()
                    if stub is self.stub:
                        raise

        setattr(self, name, call)  # from now on it is the same one
        return call


class _Cluster(etcdrpc.ClusterStub):  # type: ignore[name-defined]
    """Knows learners; its messages have the fields of a removal's."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)
        self.MemberPromote = channel.unary_unary(
            "/etcdserverpb.Cluster/MemberPromote",
            request_serializer=etcdrpc.MemberRemoveRequest.SerializeToString,
            response_deserializer=etcdrpc.MemberRemoveResponse.FromString,
        )


STUBS = {
    "kv": etcdrpc.KVStub,
    "lease": etcdrpc.LeaseStub,
    "watch": etcdrpc.WatchStub,
    "cluster": _Cluster,
    "maintenance": etcdrpc.MaintenanceStub,
    "auth": etcdrpc.AuthStub,
}


class Calls:
    """Thread-safe. Belongs to the process that made it: gRPC does not survive a fork."""

    def __init__(
        self,
        endpoints: Sequence[str],
        user: str | None,
        password: str | None,
        ca_cert: str | None,
        cert_key: str | None,
        cert_cert: str | None,
        timeout: float,
        deadline: float,
        follow: bool = False,
    ) -> None:
        if isinstance(endpoints, str) or not endpoints:
            raise EtcdUsageError(
                f"etcd endpoints must be a list of host:port, got {endpoints!r}",
                rule="etcd-endpoint",
                help='pass e.g. ["127.0.0.1:2379"]',
            )
        parsed = [parse_endpoint(e) for e in endpoints]
        self.endpoints, self.urls = tuple(map(str, parsed)), tuple(endpoints)
        self.timeout, self.deadline = timeout, deadline
        self._login = (user, password) if user else None
        self._token: str | None = None
        self._token_lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        # Nothing has got through since the last failure: a write that cannot be repeated sends a read first.
        self.suspect = True
        self._files = (ca_cert, cert_key, cert_cert)
        self._follow, self._next_look = follow, 0.0
        self._move_lock = threading.Lock()
        self._services = {name: _Service(self.check_usable) for name in STUBS}
        self.kv, self.lease, self.watch = (self._services[name] for name in ("kv", "lease", "watch"))
        self.cluster, self.maintenance = self._services["cluster"], self._services["maintenance"]
        self._auth = self._services["auth"]
        self._left: grpc.Channel | None = None
        """The channel to the members that were asked before: calls on it may be in progress."""
        self._use(open_channel(parsed, *self._files))

    def _use(self, channel: grpc.Channel) -> None:
        self._channel = channel
        for name, stub in STUBS.items():
            self._services[name].stub = stub(channel)

    def move(self, endpoints: Sequence[str]) -> None:
        """Asks these members from now on. Nothing happens if they are those that are asked."""
        parsed = [parse_endpoint(e) for e in endpoints]
        with self._move_lock:
            if self._closed or set(map(str, parsed)) == set(self.endpoints):
                return
            channel = open_channel(parsed, *self._files)  # raises for a name that is not known yet: nothing is changed
            left, self._left = self._left, self._channel
            self.endpoints, self.urls = tuple(map(str, parsed)), tuple(endpoints)
            self._use(channel)
        if left is not None:
            left.close()

    @uninterrupted()
    def close(self) -> None:
        with self._move_lock:
            self._closed = True
            for channel in filter(None, (self._channel, self._left)):
                channel.close()

    def repeat(self, method: Callable[..., Any], request: Any, deadline: float | None = None) -> Any:
        """A call that may be made any number of times: retried until `deadline` seconds have passed."""
        return self.attempt(lambda timeout: self.once(method, request, timeout), deadline, request)

    def single(self, method: Callable[..., Any], request: Any, timeout: float) -> Any:
        """A call that is made once. Raises `EtcdUnreachable` if it was not answered."""
        started = time.monotonic()
        try:
            return self.once(method, request, timeout)
        except grpc.RpcError as e:
            if e.code() in NO_ANSWER:
                raise self.unreachable(time.monotonic() - started, 1, e) from None
            raise self.refused(e, request) from None

    def attempt(self, call: Callable[[float], Any], deadline: float | None = None, request: Any = None) -> Any:
        """`call(timeout)` until it answers; `EtcdUnreachable` when `deadline` seconds have passed.

        `request` is named when etcd refuses it.
        """
        started = time.monotonic()
        limit = self.deadline if deadline is None else deadline
        pause, tries = FIRST_PAUSE, 0
        while True:
            left = started + limit - time.monotonic()
            tries += 1
            try:
                return call(max(0.01, min(self.timeout, left)))
            except grpc.RpcError as e:
                if e.code() not in NO_ANSWER:
                    raise self.refused(e, request) from None
                left = started + limit - time.monotonic()
                if left <= pause:
                    raise self.unreachable(time.monotonic() - started, tries, e) from None
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def probe(self, deadline: float | None = None) -> None:
        """Return when a majority answers; `EtcdUnreachable` when none did in `deadline` seconds."""

        def call(timeout: float) -> None:
            try:
                self.once(self.kv.Range, etcdrpc.RangeRequest(key=b"\0", count_only=True), timeout)
            except grpc.RpcError as e:
                if e.code() is not Code.PERMISSION_DENIED:  # which is an answer, too
                    raise

        self.attempt(call, deadline)

    def once(self, method: Callable[..., Any], request: Any, timeout: float, *, wait: bool = False) -> Any:
        """One try. `wait`: stay queued while there is no connection. Raises `grpc.RpcError`."""
        return self.logged_in(
            lambda metadata: method(request, timeout=timeout, metadata=metadata, wait_for_ready=wait), timeout
        )

    @uninterrupted()
    def logged_in(self, call: Callable[[Metadata], Any], timeout: float) -> Any:
        """`call(metadata)` with the login's token; a second time when etcd does not know the token any more. What a
        signal's handler raises would leave locks of gRPC's taken: it comes at the end, when it has no time-out left."""
        self.check_usable()
        token = self._login_token(timeout)
        try:
            try:
                answer = call(_metadata(token))
            except grpc.RpcError as e:
                if token is None or e.code() not in (Code.UNAUTHENTICATED, Code.INVALID_ARGUMENT):
                    raise
                self.forget_login(token)
                answer = call(_metadata(self._login_token(timeout)))
        except grpc.RpcError:
            self.suspect = True
            raise
        self.suspect = False
        if self._follow and time.monotonic() >= self._next_look:
            self._look_for_members()
        return answer

    def _look_for_members(self) -> None:
        """Asks those that the cluster has now: a member that was lost is replaced by one at another address."""
        self._next_look = time.monotonic() + FOLLOW_SECONDS
        with contextlib.suppress(grpc.RpcError, EtcdError):  # closed since, say: what was asked before has its answer
            answer = self.cluster.MemberList(etcdrpc.MemberListRequest(), timeout=LIST_SECONDS)
            able = [m for m in answer.members if m.name and m.clientURLs and not m.isLearner]
            urls = [str(parse_endpoint(m.clientURLs[0])) for m in able]
            if urls:
                self.move(urls)

    def check_usable(self) -> None:
        if self._closed:
            raise EtcdError("this etcd client is closed", rule="etcd-closed", help="open a new one")
        if os.getpid() != self._pid:
            raise EtcdError(
                "an etcd client was used in a forked process; gRPC does not survive a fork",
                rule="etcd-fork",
                help="start processes with multiprocessing's 'spawn' method or subprocess, and open a client in each",
            )

    def forget_login(self, token: str) -> None:
        """Drop a token that the server refused."""
        with self._token_lock:
            if self._token == token:
                self._token = None

    def refused(self, error: grpc.RpcError, request: Any = None) -> EtcdError:
        """etcd answered, and said no. The error is transient if the same request may be taken later."""
        code, details = error.code(), error.details()
        said = f"etcd refused {describe(request)}: {details} ({code.name})"
        removed = isinstance(request, etcdrpc.MemberRemoveRequest)
        if code is Code.NOT_FOUND and not removed:  # of the other calls made here, only those with a lease
            return LeaseLost(f"the lease does not exist (any more): {details}", rule="etcd-lease", help=LEASE_HELP)
        if code is Code.OUT_OF_RANGE:
            return CompactedError(said, 0)
        if code is Code.UNAUTHENTICATED:  # with a new login, too: a member that has not heard of it yet
            return EtcdBusy(said, rule="etcd-login", help="if it lasts: see the users and tokens of this etcd")
        if code is Code.PERMISSION_DENIED:
            return EtcdUsageError(said, rule="etcd-denied", help="check user and password, and the user's role in etcd")
        if code is Code.RESOURCE_EXHAUSTED:
            return self._exhausted(said, request)
        if code is Code.INVALID_ARGUMENT:
            return EtcdError(
                said,
                rule="etcd-request",
                help="check user and password, if this etcd wants a login; and "
                "its limits (--max-request-bytes, --max-txn-ops)",
            )
        return EtcdError(said, rule="etcd-request")

    def _exhausted(self, said: str, request: Any) -> EtcdError:
        """The quota is used up: then there is an alarm. Else the request is too large for gRPC, or etcd is busy."""
        if self.has_alarm(unknown=True):  # waiting is right, if none tells
            return EtcdFull(said, rule="etcd-full", help=f"etcd's quota is used up, and the job waits: {FULL_HELP}")
        if request is not None and request.ByteSize() > LEAST_LIMIT:
            return EtcdError(said, rule="etcd-request", help="the request is larger than etcd's --max-request-bytes")
        return EtcdBusy(said, rule="etcd-busy", help="it is tried again; if it lasts, give this etcd fewer jobs")

    def has_alarm(self, unknown: bool = False) -> bool:
        """Whether a member says that its space is used up; `unknown` if none answers."""
        request = etcdrpc.AlarmRequest(action="GET", alarm="NOSPACE")
        try:
            return bool(self.once(self.maintenance.Alarm, request, ALARM_SECONDS).alarms)
        except grpc.RpcError:
            return unknown

    def unreachable(self, seconds: float, tries: int, error: grpc.RpcError) -> EtcdUnreachable:
        return EtcdUnreachable(
            f"etcd did not answer at {', '.join(self.endpoints)} for {seconds:.1f} s "
            f"({tries} tries; the last one: {error.code().name}, {error.details()})",
            rule="etcd-unreachable",
            help="check that etcd runs there and has a majority, and that address, scheme and certificates are right; "
            "without endpoints graphft starts an etcd of its own",
        )

    def ambiguous(self, seconds: float, error: grpc.RpcError) -> Ambiguous:
        return Ambiguous(
            f"a write was sent to etcd at {', '.join(self.endpoints)}, and no answer came in {seconds:.1f} s "
            f"({error.code().name}, {error.details()}): it may or may not have been applied",
            rule="etcd-ambiguous",
            help="read the keys again and decide, or give the transaction a token",
        )

    def _login_token(self, timeout: float) -> str | None:
        if self._login is None:
            return None
        with self._token_lock:
            if self._token is None:
                user, password = self._login
                request = etcdrpc.AuthenticateRequest(name=user, password=password or "")
                self._token = str(self._auth.Authenticate(request, timeout=timeout).token)
            return self._token


def _metadata(token: str | None) -> Metadata:
    return (("token", token),) if token else ()
