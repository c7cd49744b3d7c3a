"""An etcd that wants a login: the users root and guest, who may do nothing."""

from __future__ import annotations

from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.etcd.messages import etcdrpc


def enable_login(server: EmbeddedEtcd) -> None:
    with Etcd(server.endpoints, timeout=10, deadline=60) as client:
        client.ping(deadline=60)  # what follows is not tried again
        auth = client._calls.auth
        auth.UserAdd(etcdrpc.AuthUserAddRequest(name="root", password="secret"))
        auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.UserAdd(etcdrpc.AuthUserAddRequest(name="guest", password="guest"))
        auth.AuthEnable(etcdrpc.AuthEnableRequest())
