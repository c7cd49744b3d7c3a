# ruff: noqa: F401
"""etcd: client, lasting watches, leases with an own deadline, a lock and an embedded server.

Import from here. gRPC, and etcd3's messages, load on first use of `Etcd`'s module; gRPC does not survive a fork.
"""

from graphft.runtime.etcd.client import Etcd
from graphft.runtime.etcd.embedded import EmbeddedEtcd, find_etcd, free_ports
from graphft.runtime.etcd.fencing import FencedStore, Lock
from graphft.runtime.etcd.lease import Session
from graphft.runtime.etcd.model import (
    KV,
    MAX_TXN_OPS,
    Ambiguous,
    CompactedError,
    Compare,
    EtcdBusy,
    EtcdError,
    EtcdFull,
    EtcdUnreachable,
    Event,
    LeaseLost,
    RangeResult,
    Store,
    TransientEtcdError,
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
