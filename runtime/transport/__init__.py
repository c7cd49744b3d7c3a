"""The data plane: buckets of bytes between trainers and shards, over ZeroMQ or simulated.

`buffers` (torch), `sim` and `faults` are imported from their modules.
"""

from graphft.runtime.process.role_environment import role_environment
from graphft.runtime.transport.address import advertise_host
from graphft.runtime.transport.faults import make_client, make_server
from graphft.runtime.transport.login import Login
from graphft.runtime.transport.port import ClientTransport, Limits, Received, Reply, Sent, ServerTransport
from graphft.runtime.transport.zeromq_client import ZmqClient
from graphft.runtime.transport.zeromq_server import ZmqServer

__all__ = [
    "ClientTransport",
    "Limits",
    "Login",
    "Received",
    "Reply",
    "Sent",
    "ServerTransport",
    "ZmqClient",
    "ZmqServer",
    "advertise_host",
    "make_client",
    "make_server",
    "role_environment",
]
