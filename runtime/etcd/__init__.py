"""etcd: client, lasting watches, leases with an own deadline, lock and election and an embedded server.

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
    present,
    put_op,
    range_op,
    value_is,
)
from graphft.runtime.etcd.recipes import Election, Lock, holder
from graphft.runtime.etcd.watch import View, Watch

__all__ = [
    "KV",
    "MAX_TXN_OPS",
    "Ambiguous",
    "CompactedError",
    "Compare",
    "Election",
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
    "View",
    "Watch",
    "WatchBatch",
    "absent",
    "create_is",
    "delete_op",
    "delete_prefix_op",
    "find_etcd",
    "free_ports",
    "get_op",
    "holder",
    "mod_is",
    "present",
    "put_op",
    "range_op",
    "value_is",
]
