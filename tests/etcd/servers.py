"""Real etcds that are full, or want a login, and the proxy in front of one that loses what a test tells it to lose."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdFull
from graphft.runtime.etcd.channel import etcdrpc


def full_etcd(folder: Path) -> EmbeddedEtcd:
    """A server that takes half a megabyte, not started."""
    return EmbeddedEtcd(folder, options=[f"--quota-backend-bytes={512 << 10}"])


def fill(etcd: Etcd) -> None:
    with contextlib.suppress(EtcdFull):
        while True:
            etcd.put("/filler", bytes(50_000))


def compact(etcd: Etcd, revision: int) -> None:
    etcd._kv.Compact(etcdrpc.CompactionRequest(revision=revision, physical=True), timeout=60)


def cure(etcd: Etcd) -> None:
    """What an administrator does: compact, defragment, disarm."""
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


class Proxy:
    """Forwards loopback connections to `target` (host:port). Traffic can be swallowed in either direction, or cut."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self.drop_requests = False
        self.drop_replies = False
        self.refuse = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close all connections. New ones are taken, unless `refuse`."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def heal(self) -> None:
        """Lose nothing any more. What was swallowed is gone, so its connections are cut."""
        self.cut()  # first, or what is read already, and not yet swallowed, would get through
        self.drop_requests = self.drop_replies = self.refuse = False
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            server = socket.create_connection(self._target)
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, "drop_requests"), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, "drop_replies"), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, drop: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not getattr(self, drop):
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
