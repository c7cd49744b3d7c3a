"""The data plane: buckets of bytes between trainers and shards, over ZeroMQ or simulated.

`buffers` (torch) and `address` are imported from their modules.
"""

from graphft.runtime.transport.channel import KeyPair, Login
from graphft.runtime.transport.port import ClientTransport, Limits, Received, Reply, Sent, ServerTransport
from graphft.runtime.transport.zeromq import ZmqClient, ZmqServer

__all__ = [
    "ClientTransport",
    "KeyPair",
    "Limits",
    "Login",
    "Received",
    "Reply",
    "Sent",
    "ServerTransport",
    "ZmqClient",
    "ZmqServer",
]
