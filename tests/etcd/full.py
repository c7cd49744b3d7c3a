"""A real etcd whose space is used up, and what an administrator does about it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdBinary, EtcdFull, find_etcd
from graphft.runtime.etcd.messages import etcdrpc

QUOTA = 512 << 10


def with_options(*options: str) -> EtcdBinary:
    found = find_etcd()
    return EtcdBinary(found.path, found.version, (*found.options, *options))


def full_etcd(folder: Path) -> EmbeddedEtcd:
    """A server that takes half a megabyte, not started."""
    return EmbeddedEtcd(folder, binary=with_options(f"--quota-backend-bytes={QUOTA}"))


def fill(etcd: Etcd) -> None:
    with contextlib.suppress(EtcdFull):
        while True:
            etcd.put("/filler", bytes(50_000))


def defragment(etcd: Etcd) -> None:
    etcd._calls.maintenance.Defragment(etcdrpc.DefragmentRequest(), timeout=60)


def cure(etcd: Etcd) -> None:
    """What an administrator does: compact, defragment, disarm."""
    etcd.compact(etcd.status().revision)
    defragment(etcd)
    maintenance = etcd._calls.maintenance
    for alarm in maintenance.Alarm(etcdrpc.AlarmRequest(action="GET"), timeout=60).alarms:
        off = etcdrpc.AlarmRequest(action="DEACTIVATE", alarm=alarm.alarm, memberID=alarm.memberID)
        maintenance.Alarm(off, timeout=60)
