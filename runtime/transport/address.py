"""Addresses: `tcp://host:port`, IPv6 hosts in brackets; and which host to tell others."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from graphft.errors import UsageError
from graphft.runtime.transport.port import ServerTransport

WILDCARDS = ("0.0.0.0", "::", "*", "")
"""Hosts that mean "every interface"."""


def endpoint(host: str, port: int | str) -> str:
    """Returns `tcp://host:port`, with the brackets that IPv6 needs."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_endpoint(address: str) -> tuple[str, int]:
    """Returns host and port of `tcp://host:port`. Raises GraphftError for anything else."""
    try:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise UsageError(
        f"'{address}' is no address of a shard: expected tcp://HOST:PORT",
        rule="address",
        help="IPv6 hosts stand in brackets: tcp://[::1]:5555",
    )


def with_key(address: str, public: str) -> str:
    """Returns `tcp://KEY@host:port`: where a process listens, and the public key by which one knows it."""
    return address.replace("//", f"//{public}@", 1) if public else address


def split_key(address: str) -> tuple[str, str]:
    """Returns the public key of an address, "" without one, and the address without it."""
    scheme, _, rest = address.partition("//")
    public, _, place = rest.rpartition("@")
    return public, f"{scheme}//{place}"


def is_loopback(host: str) -> bool:
    """True if only processes of the same network can reach this host."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def network_identity() -> str:
    """Identifies the processes that reach each other on loopback: this boot's id and their network namespace; the
    machine's name where /proc does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


def network_digest() -> str:
    """Returns a short name of `network_identity`."""
    return hashlib.blake2b(network_identity().encode(), digest_size=8).hexdigest()


def advertise_host(toward: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> str:
    """Returns the host under which the job's other processes reach this one.

    $GRAPHFT_HOST; else the address of the interface that leads to the first of the hosts `toward` (etcd's: every
    process can reach them) that is not this machine's loopback. 127.0.0.1 where there is none, so that a job whose
    etcd is on loopback can be reached on this machine only. Nothing is sent.
    """
    host = environ.get("GRAPHFT_HOST", "")
    if host not in WILDCARDS:
        return host
    found = [source for target in toward if (source := _source_toward(target)) is not None]
    return next((source for source in found if not is_loopback(source)), found[0] if found else "127.0.0.1")


def listen_host(toward: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> str:
    """Returns the host to listen on: the advertised one; every interface where $GRAPHFT_HOST is 0.0.0.0, :: or *."""
    host = environ.get("GRAPHFT_HOST", "")
    return host if host and host in WILDCARDS else advertise_host(toward, environ)


def listen(transport: ServerTransport, etcd_hosts: Sequence[str]) -> str:
    """Listens where the way to etcd begins; returns the address for the others."""
    _, port = split_endpoint(transport.bind(listen_host(etcd_hosts)))
    return endpoint(advertise_host(etcd_hosts), port)


def _source_toward(target: str) -> str | None:
    """Returns this machine's address on the way to a host; None without a way."""
    try:
        found = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, proto, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None
