"""Where a role that others call listens."""

from __future__ import annotations

from collections.abc import Sequence

from graphft.runtime.transport import ServerTransport
from graphft.runtime.transport.address import advertise_host, endpoint, listen_host, split_endpoint


def listen(transport: ServerTransport, etcd_hosts: Sequence[str]) -> str:
    """Listens where the way to etcd begins; returns the address for the others."""
    _, port = split_endpoint(transport.bind(listen_host(etcd_hosts)))
    return endpoint(advertise_host(etcd_hosts), port)
