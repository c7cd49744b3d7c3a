"""etcd: client, lasting watches, leases with an own deadline, a lock and an embedded server.

Import from here. gRPC, and etcd3's messages, load on first use of `Etcd`'s module; gRPC does not survive a fork.
"""

from graphft.runtime.etcd.binary import EtcdBinary, find_etcd
from graphft.runtime.etcd.client import Etcd, Member, Status
from graphft.runtime.etcd.embedded import EmbeddedCluster, EmbeddedEtcd, free_ports
from graphft.runtime.etcd.errors import (
    Ambiguous,
    CompactedError,
    EtcdBusy,
    EtcdError,
    EtcdFull,
    EtcdUnreachable,
    EtcdUsageError,
    LeaseLost,
    StreamEnded,
    TransientEtcdError,
)
from graphft.runtime.etcd.fenced import FencedStore
from graphft.runtime.etcd.lease import Session
from graphft.runtime.etcd.lock import Lock
from graphft.runtime.etcd.model import (
    KV,
    MAX_TXN_OPS,
    Compare,
    Event,
    Op,
    RangeResult,
    Store,
    TxnResult,
    WatchBatch,
    absent,
    create_is,
    delete_op,
    delete_prefix_op,
    get_op,
    mod_is,
    put_op,
    range_op,
    value_is,
)
from graphft.runtime.etcd.watch import Watch

__all__ = [
    "KV",
    "MAX_TXN_OPS",
    "Ambiguous",
    "CompactedError",
    "Compare",
    "EmbeddedCluster",
    "EmbeddedEtcd",
    "Etcd",
    "EtcdBinary",
    "EtcdBusy",
    "EtcdError",
    "EtcdFull",
    "EtcdUnreachable",
    "EtcdUsageError",
    "Event",
    "FencedStore",
    "LeaseLost",
    "Lock",
    "Member",
    "Op",
    "RangeResult",
    "Session",
    "Status",
    "Store",
    "StreamEnded",
    "TransientEtcdError",
    "TxnResult",
    "Watch",
    "WatchBatch",
    "absent",
    "create_is",
    "delete_op",
    "delete_prefix_op",
    "find_etcd",
    "free_ports",
    "get_op",
    "mod_is",
    "put_op",
    "range_op",
    "value_is",
]
