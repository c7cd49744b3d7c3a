"""A real etcd as a child process: the embedded default, and what tests kill and freeze."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom

from graphft.runtime.etcd.binary import EtcdBinary, find_etcd
from graphft.runtime.etcd.client import Etcd
from graphft.runtime.etcd.errors import EtcdError, EtcdUnreachable
from graphft.runtime.process.role_process import tied

HOST = "127.0.0.1"
ROOM_BYTES = 64 << 20
"""A disk with less room is full: etcd writes its log into files of that size, which it allocates beforehand."""
OPTIONS = (
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=5m",
    "--snapshot-count=10000",
    "--logger=zap",
    "--log-level=warn",
)
START_TIMEOUT, STOP_TIMEOUT = 60.0, 5.0  # seconds
POLL = 0.005
FIRST_PORT, LAST_PORT = 10_000, 32_767


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Ports of `host` that are free now, below those that the kernel gives to outgoing connections.

    A client that keeps trying to reach a dead server on a port *among* those can get connected to itself, and then
    the server cannot have its port back.
    """
    found: set[int] = set()
    draw = SystemRandom()
    while len(found) < count:
        port = draw.randint(FIRST_PORT, LAST_PORT)
        if port_free(port, host):
            found.add(port)
    return list(found)


def port_free(port: int, host: str = HOST) -> bool:
    """True if a server could listen on this port of one of this machine's addresses now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class Child:
    """One run of a program that dies with this process, its output appended to `log`, in a session of its own (Ctrl-C
    does not reach it). A thread starts it and waits for it: the kernel takes the thread for its parent (`tied`)."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = tied([str(part) for part in command])
        self._log = log
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name=f"child {log.stem}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise EtcdError(f"{command[0]} does not start: {self._error}", rule="etcd-start") from self._error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the child still runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until all of the child's threads have stopped: the signal alone takes effect later."""
        self.send(signal.SIGSTOP)
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # it has ended
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def wait(self, timeout: float | None = None) -> bool:
        """Returns True if the child has ended (and was collected) within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as e:
            self._error = e
        finally:
            self._started.set()
        if self._process is not None:
            self._process.wait()


class EmbeddedEtcd:
    """A single etcd, with its data and its log (`etcd.log`) in `data_dir`. `start` it, or use `with`.

    A later `start`, of this object or of another with the same `data_dir`, finds the same data; this object keeps its
    port, too. The server dies with this process, however that ends. `host`: the address of this machine at which it
    listens; anybody who reaches it may read and write. `port` 0 picks a free one. `ports` (client, peer), `cluster`
    (etcd's --initial-cluster), `heartbeat` and `election` (milliseconds) are for members of a cluster, which reach one
    another at `host`.
    """

    def __init__(
        self,
        data_dir: str | Path,
        *,
        host: str = HOST,
        port: int = 0,
        binary: EtcdBinary | None = None,
        name: str = "",
        ports: tuple[int, int] | None = None,
        cluster: str = "",
        heartbeat: int = 10,
        election: int = 50,
    ) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.log = self.data_dir / "etcd.log"
        # A name of its own: an answer on our port from somebody else's server is told apart by it.
        self.name = name or f"graphft-{uuid.uuid4().hex}"
        self._binary = binary
        self.host = host
        self._port, self._ports, self._cluster = port, ports, cluster
        self._timing = (f"--heartbeat-interval={heartbeat}", f"--election-timeout={election}")
        self._child: Child | None = None

    def __enter__(self) -> EmbeddedEtcd:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoints(self) -> list[str]:
        """The endpoints for `Etcd(...)` and `--etcd`. Known from the first start on."""
        if self._ports is None:
            raise EtcdError("this etcd has no address before it is started", rule="etcd-start", help="call start()")
        return [self._at(self._ports[0])]

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    @property
    def has_data(self) -> bool:
        """True if what it has written is still there."""
        return (self.data_dir / "data" / "member").exists()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._running().pid

    def start(self, timeout: float = START_TIMEOUT) -> EmbeddedEtcd:
        """Start it and return when it answers. `EtcdError` with the end of its log when it does not."""
        try:
            self.launch()
            self.await_healthy(timeout)
        except EtcdError:
            self.kill()
            raise
        return self

    def launch(self) -> None:
        """Start it without waiting."""
        if self.running:
            raise EtcdError(f"etcd at {self.endpoints[0]} runs already", rule="etcd-start", help="stop it first")
        self._binary = self._binary or find_etcd()
        if self._ports is None:
            client, peer = free_ports(2, self.host)
            self._ports = (self._port or client, peer)
        self._check_ports()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._child = Child([str(self._binary.path), *self._arguments(self._ports[1]), *self._binary.options], self.log)

    def await_healthy(self, timeout: float = START_TIMEOUT) -> None:
        """Return when it answers through a majority. `EtcdError` when it has ended, or `timeout` has passed."""
        end = time.monotonic() + timeout
        with Etcd(self.endpoints) as client:
            while not self._answers(client):
                if not self.running:
                    self._check_ports()
                    raise self._failed("ended while it was starting")
                if time.monotonic() > end:
                    raise self._failed(f"did not answer within {timeout:.0f} s")
                time.sleep(POLL)

    def stop(self) -> None:
        """End it cleanly (SIGTERM), by force after 5 seconds. Does nothing when it does not run."""
        if self._child is not None:
            self._child.send(signal.SIGTERM)
            self._child.send(signal.SIGCONT)
            if not self._child.wait(STOP_TIMEOUT):
                self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self._child is not None:
            self._child.send(signal.SIGKILL)
            self._child.wait()

    def restart(self) -> EmbeddedEtcd:
        """`kill` and `start`: same data, same port."""
        self.kill()
        return self.start()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): it keeps its connections, and answers nothing."""
        self._running().freeze()

    def resume(self) -> None:
        self._running().send(signal.SIGCONT)

    def _running(self) -> Child:
        if self._child is None or not self._child.running:
            raise EtcdError("this etcd does not run", rule="etcd-start", help="start it first")
        return self._child

    def _arguments(self, peer: int) -> Sequence[str]:
        peers = self._at(peer, self._peer_host)
        return (
            f"--name={self.name}",
            f"--data-dir={self.data_dir / 'data'}",
            f"--listen-client-urls=http://{self.endpoints[0]}",
            f"--advertise-client-urls=http://{self.endpoints[0]}",
            f"--listen-peer-urls=http://{peers}",
            f"--initial-advertise-peer-urls=http://{peers}",
            f"--initial-cluster={self._cluster or f'{self.name}=http://{peers}'}",
            *self._timing,
            *OPTIONS,
        )

    @property
    def _peer_host(self) -> str:
        """One that is alone has no peers."""
        return self.host if self._cluster else HOST

    def _at(self, port: int, host: str = "") -> str:
        host = host or self.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _answers(self, client: Etcd) -> bool:
        assert self._ports is not None
        try:  # faster than the channel, which pauses between its tries
            socket.create_connection((self.host, self._ports[0])).close()
        except OSError:
            return False
        try:
            client.ping(deadline=0.5)
            return any(m.name == self.name for m in client.members(deadline=0.5))
        except EtcdUnreachable:
            return False
        except EtcdError:  # it wants a login, which is an answer, too
            return True

    def _check_ports(self) -> None:
        hosts = (self.host, self._peer_host)
        busy = [at for at in zip(hosts, self._ports or (), strict=False) if not port_free(at[1], at[0])]
        if busy:
            raise EtcdError(
                f"etcd cannot listen on {busy[0][0]}:{busy[0][1]}: the port is in use",
                rule="port-busy",
                help="stop the program that uses it (ss -ltnp shows which), or choose another port",
            )

    @property
    def full_disk(self) -> str:
        """Says in words that there is hardly any room left for its data, in which case it can write nothing, and
        answers nothing. Empty otherwise."""
        try:
            free = shutil.disk_usage(self.data_dir).free
        except OSError:
            return ""
        return f"the disk of {self.data_dir} is full ({free:,} bytes are left)" if free < ROOM_BYTES else ""

    def _failed(self, how: str) -> EtcdError:
        if full := self.full_disk:
            return EtcdError(
                f"etcd cannot write: {full}",
                rule="disk-full",
                help=f"free {ROOM_BYTES >> 20} MB there, which etcd allocates for its log, or choose another folder",
            )
        tail = ""
        with contextlib.suppress(OSError):
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
        return EtcdError(
            f"etcd at {self.endpoints[0]} {how}; the end of {self.log}:\n{tail}",
            rule="etcd-start",
            help="see the log; another etcd that uses the same data directory shows there as well. If its data is "
            f"damaged, delete {self.data_dir}: a job goes on from its newest checkpoint",
        )


class EmbeddedCluster:
    """Several etcd members on loopback, one folder each under `data_dir`: for tests of fail-over."""

    def __init__(
        self,
        data_dir: str | Path,
        size: int = 3,
        *,
        binary: EtcdBinary | None = None,
        heartbeat: int = 50,
        election: int = 500,
    ) -> None:
        self.data_dir, self._size = Path(data_dir).resolve(), size
        self._binary, self._heartbeat, self._election = binary, heartbeat, election
        self.members: list[EmbeddedEtcd] = []

    def __enter__(self) -> EmbeddedCluster:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for member in self.members for endpoint in member.endpoints]

    def start(self) -> EmbeddedCluster:
        """Start all members anew and return when each of them answers."""
        self._binary = self._binary or find_etcd()
        self.members = self._new_members()
        for member in self.members:
            member.launch()
        for member in self.members:
            member.await_healthy()
        return self

    def stop(self) -> None:
        for member in self.members:
            member.kill()

    def leader(self) -> EmbeddedEtcd:
        """The member that leads now. `EtcdError` while there is none."""
        for member in filter(lambda member: member.running, self.members):
            with Etcd(member.endpoints) as client, contextlib.suppress(EtcdUnreachable):
                status = client.status(deadline=1.0)
                if status.leader == status.member:
                    return member
        raise EtcdError("the cluster has no leader now", rule="etcd-cluster", help="wait for the election")

    def _new_members(self) -> list[EmbeddedEtcd]:
        shutil.rmtree(self.data_dir, ignore_errors=True)
        token = uuid.uuid4().hex
        ports = free_ports(2 * self._size)
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        names = [f"graphft-{token}-{i}" for i in range(self._size)]
        cluster = ",".join(f"{name}=http://{HOST}:{peer}" for name, (_, peer) in zip(names, pairs, strict=True))
        return [
            EmbeddedEtcd(
                self.data_dir / str(i),
                binary=self._binary,
                name=name,
                ports=pair,
                cluster=cluster,
                heartbeat=self._heartbeat,
                election=self._election,
            )
            for i, (name, pair) in enumerate(zip(names, pairs, strict=True))
        ]
