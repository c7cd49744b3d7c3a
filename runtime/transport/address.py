"""Addresses: `tcp://host:port`, IPv6 hosts in brackets; and which host to tell others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from graphft.errors import GraphftError

WILDCARDS = ("0.0.0.0", "::", "*", "")
"""Hosts that mean "every interface": good to listen on, no address for anybody else."""


def endpoint(host: str, port: int | str) -> str:
    """`tcp://host:port`, with the brackets that IPv6 needs."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_endpoint(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`. Raises GraphftError for anything else."""
    try:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise GraphftError(f"'{address}' is no address of a shard: expected tcp://HOST:PORT", rule="address",
                       help="IPv6 hosts stand in brackets: tcp://[::1]:5555")


def advertise_host(toward: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The host under which others reach this machine.

    $GRAPHFT_HOST, or the address of the interface that leads to host `toward` (etcd's, say; default: to the outside),
    or 127.0.0.1 on a machine without a network. Nothing is sent.
    """
    if host := environ.get("GRAPHFT_HOST"):
        return host
    # An address of the range for documentation: a route to it is the default route, and nobody answers there.
    target = toward or "192.0.2.1"
    try:
        (family, kind, proto, _, address), *_ = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
