"""The transports of a role's process: ZeroMQ, and around it the faults that the environment asks for."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from graphft.errors import UsageError
from graphft.runtime.transport.faults import Faults, FaultyClient, FaultyServer
from graphft.runtime.transport.login import Login
from graphft.runtime.transport.port import ClientTransport, Limits, ServerTransport
from graphft.runtime.transport.zeromq_client import ZmqClient
from graphft.runtime.transport.zeromq_server import ZmqServer

VARIABLE = "GRAPHFT_FAULTS"
"""JSON with fields of `Faults`, such as {"seed": 1, "drop": 0.001}: what messages are to suffer. For tests."""


def make_client(
    identity: str, role: str, limits: Limits, login: Login, environ: Mapping[str, str] = os.environ
) -> ClientTransport:
    """A client of the shards. `role` ("trainer 0") tells the processes' faults apart."""
    faults, client = faults_of(role, environ), ZmqClient(identity, limits, login)
    return client if faults is None else FaultyClient(client, faults)


def make_server(role: str, limits: Limits, login: Login, environ: Mapping[str, str] = os.environ) -> ServerTransport:
    """A shard's server. `role` ("pserver 0") tells the processes' faults apart."""
    faults, server = faults_of(role, environ), ZmqServer(limits, login)
    return server if faults is None else FaultyServer(server, faults)


def faults_of(role: str, environ: Mapping[str, str]) -> Faults | None:
    """What this role's messages are to suffer; each role has a schedule of its own, from the one seed."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    try:
        faults = msgspec.json.decode(text, type=Faults)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{VARIABLE} is {text!r}: {error}",
            rule="environment",
            help='give JSON such as {"seed": 1, "drop": 0.001}, or unset it',
        ) from error
    return replace(faults, seed=faults.seed ^ zlib.crc32(role.encode()))
