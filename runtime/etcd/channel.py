"""One gRPC channel to all endpoints of etcd, with time-outs, retries, fail-over and login.

The options were measured: after a leader is killed, writes go on in 1 to 2 seconds; a frozen server is noticed by the
keep-alive pings after 6 to 9 seconds (at pings more often than every 5 seconds the server would hang up).

The status code alone decides what may be retried:

* UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, INTERNAL, UNKNOWN, ABORTED: no answer. The request may have been applied.
* UNAUTHENTICATED, INVALID_ARGUMENT with a login: refused before anything was done; log in again once.
* RESOURCE_EXHAUSTED: refused; the quota is used up, or etcd is busy, or the request is too large (`_exhausted`).
* everything else: refused for good, nothing was changed.

The messages are python `etcd3`'s, whose generated code protobuf >= 4.21 refuses. The serialized file descriptors in it
are good: they are read from its source into a private pool, and registered under the names that etcd3 looks for.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from graphft.runtime.etcd.model import EtcdBusy, EtcdError, EtcdFull, EtcdUnreachable, EtcdUsageError, LeaseLost
from graphft.runtime.process.interrupts import uninterrupted

ENDPOINT = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>\d+))?/?"
)
OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the time-out of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),  # a full range may hold more than the default 4 MB
    ("grpc.use_local_subchannel_pool", 1),  # two clients in a process share no connection
    ("grpc.enable_http_proxy", 0),
)
Code = grpc.StatusCode
NO_ANSWER = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN, Code.ABORTED}
Metadata = tuple[tuple[str, str], ...]
FIRST_PAUSE, LAST_PAUSE = 0.02, 0.25  # seconds between tries
LEAST_LIMIT = 512 << 10
"""Bytes: what etcd's gRPC takes beyond its own limit of a request. What is refused there as too large is larger."""
ALARM_SECONDS = 1.0
LEASE_HELP = (
    "the holder was silent for longer than its TTL, or somebody revoked it; stop, and start anew with a new lease"
)
FULL_HELP = (
    "compact it, defragment, disarm the alarm (etcdctl compact --physical, defrag, alarm disarm), or start it with a "
    "larger --quota-backend-bytes"
)


def _module(pool: Any, name: str, source: Path) -> ModuleType:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            pool.AddSerializedFile(ast.literal_eval(node.value.args[0]).encode("latin1"))
    file, module = pool.FindFileByName(source.name.replace("_pb2.py", ".proto")), ModuleType(name)
    for message, descriptor in file.message_types_by_name.items():
        setattr(module, message, message_factory.GetMessageClass(descriptor))
    for enum, descriptor in file.enum_types_by_name.items():
        setattr(module, enum, EnumTypeWrapper(descriptor))
    return module


def _load() -> ModuleType:
    """Returns the module `etcd3.etcdrpc`: etcd's messages and gRPC stubs."""
    package = importlib.util.find_spec("etcd3")
    assert package is not None
    assert package.origin is not None
    pool = descriptor_pool.DescriptorPool()
    for name in ("kv", "auth", "rpc"):  # in the order of their imports
        full = f"etcd3.etcdrpc.{name}_pb2"
        sys.modules[full] = _module(pool, full, Path(package.origin).with_name("etcdrpc") / f"{name}_pb2.py")
    return importlib.import_module("etcd3.etcdrpc")


etcdrpc = _load()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd member's client address. `secure` is None when no scheme was written."""

    host: str
    port: int
    secure: bool | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Reads `host`, `host:port` or `[v6]:port`, with http://, https:// or nothing in front."""
    match = ENDPOINT.fullmatch(text.strip())
    port = int(match["port"] or 2379) if match else 0
    if match is None or not 0 < port < 65536:
        raise EtcdUsageError(
            f"{text!r} is not an etcd endpoint",
            rule="etcd-endpoint",
            help="write host:port, http://host:port or https://host:port (an IPv6 address in brackets)",
        )
    secure = None if match["scheme"] is None else match["scheme"] == "https"
    return Endpoint(match["v6"] or match["host"], port, secure)


def target_of(endpoints: Sequence[Endpoint]) -> str:
    """Returns gRPC's name for all endpoints together. One host name stays a name: a moved server is found again."""
    if len(endpoints) == 1:
        return f"dns:///{endpoints[0]}"
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        try:
            found = [socket.getaddrinfo(e.host, e.port, family, socket.SOCK_STREAM)[0][4] for e in endpoints]
        except (OSError, UnicodeError):  # the latter: a..b
            continue
        return f"{scheme}:" + ",".join(str(Endpoint(str(address[0]), int(address[1]))) for address in found)
    raise EtcdUnreachable(
        f"the names of the etcd endpoints {', '.join(map(str, endpoints))} do not resolve to addresses of one kind",
        rule="etcd-unreachable",
        help="check their spelling and this machine's DNS; give all of them as IPv4 addresses, or all as IPv6",
    )


def open_channel(
    endpoints: Sequence[Endpoint], ca_cert: str | None, cert_key: str | None, cert_cert: str | None
) -> grpc.Channel:
    """Connects lazily. TLS when a certificate is given or an endpoint says https; the files are read here."""
    options: list[tuple[str, Any]] = list(OPTIONS)
    if not (ca_cert or cert_key or cert_cert or any(e.secure for e in endpoints)):
        return grpc.insecure_channel(target_of(endpoints), options)
    if any(e.secure is False for e in endpoints) or bool(cert_key) != bool(cert_cert):
        raise EtcdUsageError(
            "TLS to etcd needs https:// (or no scheme) at every endpoint, and both of a client's certificate and key",
            rule="etcd-tls",
            help="use the same scheme for all endpoints, and give cert_cert and cert_key together",
        )
    try:
        files = [Path(path).read_bytes() if path else None for path in (ca_cert, cert_key, cert_cert)]
    except OSError as e:
        raise EtcdUsageError(
            f"the certificate file {e.filename} cannot be read: {e.strerror}", rule="etcd-tls", help="check its path"
        ) from e
    # The target is a list of addresses; the certificate is checked against the first endpoint's name.
    options.append(("grpc.ssl_target_name_override", endpoints[0].host))
    return grpc.secure_channel(target_of(endpoints), grpc.ssl_channel_credentials(*files), options)


class Channel:
    """Calls with retries. Thread-safe. Belongs to the process that made it: gRPC does not survive a fork.

    `timeout` is per try, `deadline` per call, both in seconds.
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
        self._suspect = True
        self._channel = open_channel(parsed, ca_cert, cert_key, cert_cert)
        self._kv, self._lease = etcdrpc.KVStub(self._channel), etcdrpc.LeaseStub(self._channel)
        self._watch, self._auth = etcdrpc.WatchStub(self._channel), etcdrpc.AuthStub(self._channel)
        self._maintenance = etcdrpc.MaintenanceStub(self._channel)

    @uninterrupted()
    def close(self) -> None:
        """Closes the channel; calls and watches in progress end with an error."""
        self._closed = True
        self._channel.close()

    def repeat(self, method: Callable[..., Any], request: Any, deadline: float | None = None) -> Any:
        """Makes a call that may be made any number of times, until `deadline` seconds have passed."""
        return self.attempt(lambda timeout, wait: self.once(method, request, timeout, wait=wait), request, deadline)

    def attempt(
        self,
        call: Callable[[float, bool], Any],
        request: Any,
        deadline: float | None = None,
        *,
        repeats: bool = True,
        silent: Callable[[float, int, grpc.RpcError], EtcdError] | None = None,
    ) -> Any:
        """Makes `call(timeout, wait)` until it answers, or once, if it must not be repeated. Each second try waits for
        a connection: gRPC before 1.80 connects only meanwhile. The others are told why there is none.

        When `deadline` seconds have passed, raises what `silent` makes of (seconds, tries, last error), by default
        `EtcdUnreachable`. `request` is named when etcd refuses it.
        """
        started = time.monotonic()
        limit = self.deadline if deadline is None else deadline
        pause, tries, why = FIRST_PAUSE, 0, None
        while True:
            left = max(0.01, started + limit - time.monotonic())
            tries += 1
            try:
                return call(min(self.timeout, left) if repeats else left, tries % 2 == 0 or not repeats)
            except grpc.RpcError as e:
                if e.code() not in NO_ANSWER:
                    raise self.refused(e, request) from None
                why = e if why is None or e.code() is Code.UNAVAILABLE else why
                seconds = time.monotonic() - started
                if not repeats or seconds + pause >= limit:
                    raise (silent or self._unreachable)(seconds, tries, why) from None
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def ping(self, deadline: float | None = 3.0) -> None:
        """Returns when a majority answers; `EtcdUnreachable` when none did in `deadline` seconds."""
        try:
            self.repeat(self._kv.Range, etcdrpc.RangeRequest(key=b"\0", count_only=True), deadline)
        except EtcdUsageError as error:
            if error.rule != "etcd-denied":  # which is an answer, too
                raise

    def once(self, method: Callable[..., Any], request: Any, timeout: float, *, wait: bool = False) -> Any:
        """Makes one try. `wait`: stay queued while there is no connection. Raises `grpc.RpcError`."""
        return self.logged_in(
            lambda metadata: method(request, timeout=timeout, metadata=metadata, wait_for_ready=wait), timeout
        )

    @uninterrupted()
    def logged_in(self, call: Callable[[Metadata], Any], timeout: float) -> Any:
        """Makes `call(metadata)` with the login's token; a second time when etcd does not know the token any more. What
        a signal's handler raises would leave locks of gRPC's taken: it comes at the end."""
        self._check_usable()
        try:
            token = self._login_token(timeout)
            try:
                answer = call(_metadata(token))
            except grpc.RpcError as e:
                if token is None or e.code() not in (Code.UNAUTHENTICATED, Code.INVALID_ARGUMENT):
                    raise
                with self._token_lock:
                    if self._token == token:
                        self._token = None
                answer = call(_metadata(self._login_token(timeout)))
        except grpc.RpcError:
            self._suspect = True
            raise
        except ValueError:  # another thread has closed the channel meanwhile
            self._check_usable()
            raise
        self._suspect = False
        return answer

    def _check_usable(self) -> None:
        if self._closed:
            raise EtcdError("this etcd client is closed", rule="etcd-closed", help="open a new one")
        if os.getpid() != self._pid:
            raise EtcdError(
                "an etcd client was used in a forked process; gRPC does not survive a fork",
                rule="etcd-fork",
                help="start processes with multiprocessing's 'spawn' method or subprocess, and open a client in each",
            )

    def refused(self, error: grpc.RpcError, request: Any) -> EtcdError:
        """Returns the error of an answer that says no. It is transient if the same request may be taken later."""
        code, details = error.code(), error.details()
        said = f"etcd refused {_describe(request)}: {details} ({code.name})"
        if code is Code.NOT_FOUND:  # of the calls made here, only those with a lease
            return LeaseLost(f"the lease does not exist (any more): {details}", rule="etcd-lease", help=LEASE_HELP)
        if code is Code.UNAUTHENTICATED:  # with a new login, too: a member that has not heard of it yet
            return EtcdBusy(said, rule="etcd-login", help="if it lasts: see the users and tokens of this etcd")
        if code is Code.PERMISSION_DENIED:
            return EtcdUsageError(said, rule="etcd-denied", help="check user and password, and the user's role in etcd")
        if code is Code.RESOURCE_EXHAUSTED:
            return self._exhausted(said, request)
        help = (
            "check user and password, if this etcd wants a login; and its limits (--max-request-bytes, --max-txn-ops)"
        )
        return EtcdError(said, rule="etcd-request", help=help)

    def _exhausted(self, said: str, request: Any) -> EtcdError:
        """Returns EtcdFull if there is an alarm; else the request is too large for gRPC, or etcd is busy."""
        if self._has_alarm(unknown=True):  # waiting is right, if none tells
            return EtcdFull(said, rule="etcd-full", help=f"etcd's quota is used up, and the job waits: {FULL_HELP}")
        if request.ByteSize() > LEAST_LIMIT:
            return EtcdError(said, rule="etcd-request", help="the request is larger than etcd's --max-request-bytes")
        return EtcdBusy(said, rule="etcd-busy", help="it is tried again; if it lasts, give this etcd fewer jobs")

    def is_full(self) -> bool:
        """True if its quota is used up, and it takes no records. False if it does not answer."""
        return self._has_alarm(unknown=False)

    def _has_alarm(self, unknown: bool) -> bool:
        request = etcdrpc.AlarmRequest(action="GET", alarm="NOSPACE")
        try:
            return bool(self.once(self._maintenance.Alarm, request, ALARM_SECONDS).alarms)
        except grpc.RpcError:
            return unknown

    def _unreachable(self, seconds: float, tries: int, error: grpc.RpcError) -> EtcdUnreachable:
        return EtcdUnreachable(
            f"etcd did not answer at {', '.join(self.endpoints)} for {seconds:.1f} s "
            f"({tries} tries; the last one: {error.code().name}, {error.details()})",
            rule="etcd-unreachable",
            help="check that etcd runs there and has a majority, and that address, scheme and certificates are right; "
            "without endpoints graphft starts an etcd of its own",
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


def _describe(request: Any) -> str:
    """Names a request for errors. Values, which may be large or private, are left out."""
    ops = [getattr(op, op.WhichOneof("request")) for op in getattr(request, "success", ())]
    key = getattr(ops[0] if ops else request, "key", b"").decode(errors="replace")
    return f"a {type(request).__name__}{f' of {key}' if key else ''} ({request.ByteSize()} bytes)"
