"""The data plane: buckets of bytes between trainers and shards, over ZeroMQ or simulated."""

from graphft.runtime.transport.address import advertise_host
from graphft.runtime.transport.environment import role_environment
from graphft.runtime.transport.zeromq_client import ZmqClient
from graphft.runtime.transport.zeromq_server import ZmqServer

__all__ = ["ZmqClient", "ZmqServer", "advertise_host", "role_environment"]
