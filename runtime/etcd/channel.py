"""Endpoints to one gRPC channel that fails over between them.

The target `ipv4:host:port,host:port,...` with round-robin was measured: after a leader is killed, writes go on in 1
to 2 seconds at etcd's default timings. A frozen server (stopped, or cut off without a reset) is noticed by the
keep-alive pings after 6 to 9 seconds; without the ping time-out that takes a minute. At pings more often than every
5 seconds the server would hang up, and also at pings while no call is in progress: a channel at rest sends none.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from graphft.runtime.etcd.errors import EtcdUnreachable, EtcdUsageError

DEFAULT_PORT = 2379
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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd member's client address. `secure` is None when no scheme was written."""

    host: str
    port: int
    secure: bool | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """`host`, `host:port` or `[v6]:port`, with http://, https:// or nothing in front."""
    match = ENDPOINT.fullmatch(text.strip())
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise EtcdUsageError(
            f"{text!r} is not an etcd endpoint",
            rule="etcd-endpoint",
            help="write host:port, http://host:port or https://host:port (an IPv6 address in brackets)",
        )
    secure = None if match["scheme"] is None else match["scheme"] == "https"
    return Endpoint(match["v6"] or match["host"], port, secure)


def target_of(endpoints: Sequence[Endpoint]) -> str:
    """gRPC's name for all endpoints together. One host name stays a name, so that a moved server is found again."""
    if len(endpoints) == 1 and not _is_address(endpoints[0].host):
        return f"dns:///{endpoints[0]}"
    found = [_addresses(endpoint) for endpoint in endpoints]
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        if all(family in addresses for addresses in found):
            hosts = (Endpoint(a[family], e.port) for a, e in zip(found, endpoints, strict=True))
            return f"{scheme}:" + ",".join(map(str, hosts))
    raise EtcdUsageError(
        f"the endpoints {', '.join(map(str, endpoints))} have no address family in common",
        rule="etcd-endpoint",
        help="give all of them as IPv4 addresses, or all as IPv6",
    )


def open_channel(
    endpoints: Sequence[Endpoint], ca_cert: str | None, cert_key: str | None, cert_cert: str | None
) -> grpc.Channel:
    """Connects lazily. TLS when a certificate is given or an endpoint says https; the files are read here."""
    secure = any((ca_cert, cert_key, cert_cert)) or any(e.secure for e in endpoints)
    options: list[tuple[str, Any]] = list(OPTIONS)
    if not secure:
        return grpc.insecure_channel(target_of(endpoints), options)
    if any(e.secure is False for e in endpoints):
        raise EtcdUsageError(
            "some endpoints say http://, but others https:// or a certificate is given",
            rule="etcd-endpoint",
            help="use the same scheme for all endpoints",
        )
    if bool(cert_key) != bool(cert_cert):
        raise EtcdUsageError(
            "a client certificate needs both cert_cert and cert_key", rule="etcd-tls", help="give both"
        )
    credentials = grpc.ssl_channel_credentials(_read(ca_cert), _read(cert_key), _read(cert_cert))
    # The target is a list of addresses; the certificate is checked against the first endpoint's name.
    options.append(("grpc.ssl_target_name_override", endpoints[0].host))
    return grpc.secure_channel(target_of(endpoints), credentials, options)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _addresses(endpoint: Endpoint) -> dict[int, str]:
    try:
        infos = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:  # the latter: a..b
        raise EtcdUnreachable(
            f"the name of the etcd endpoint {endpoint} does not resolve: {e}",
            rule="etcd-unreachable",
            help="check the spelling of the endpoint and this machine's DNS",
        ) from e
    found: dict[int, str] = {}
    for family, _, _, _, address in infos:
        found.setdefault(family, str(address[0]))
    return found


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise EtcdUsageError(
            f"the certificate file {path} cannot be read: {e.strerror}", rule="etcd-tls", help="check its path"
        ) from e
