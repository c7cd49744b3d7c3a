"""Real etcds that are full, or want a login."""

from __future__ import annotations

import contextlib
from pathlib import Path

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdFull, Store
from graphft.runtime.etcd.channel import etcdrpc


def full_etcd(folder: Path) -> EmbeddedEtcd:
    """A server that takes half a megabyte, not started."""
    return EmbeddedEtcd(folder, options=[f"--quota-backend-bytes={512 << 10}"])


def fill(etcd: Etcd) -> None:
    with contextlib.suppress(EtcdFull):
        while True:
            etcd.put("/filler", bytes(50_000))


def value(store: Store, key: str) -> bytes | None:
    kv = store.get(key)
    return kv.value if kv is not None else None


def compact(etcd: Etcd, revision: int) -> None:
    etcd._kv.Compact(etcdrpc.CompactionRequest(revision=revision, physical=True), timeout=60)


def cure(etcd: Etcd) -> None:
    compact(etcd, etcd.range("/").revision)
    etcd._maintenance.Defragment(etcdrpc.DefragmentRequest(), timeout=60)
    for alarm in etcd._maintenance.Alarm(etcdrpc.AlarmRequest(action="GET"), timeout=60).alarms:
        off = etcdrpc.AlarmRequest(action="DEACTIVATE", alarm=alarm.alarm, memberID=alarm.memberID)
        etcd._maintenance.Alarm(off, timeout=60)


def enable_login(server: EmbeddedEtcd) -> None:
    """From now on it wants a login: the users root and guest, who may do nothing."""
    with Etcd(server.endpoints, timeout=10, deadline=60) as client:
        client.ping(deadline=60)  # what follows is not tried again
        auth = client._auth
        auth.UserAdd(etcdrpc.AuthUserAddRequest(name="root", password="secret"))
        auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.UserAdd(etcdrpc.AuthUserAddRequest(name="guest", password="guest"))
        auth.AuthEnable(etcdrpc.AuthEnableRequest())
