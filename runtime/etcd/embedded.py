"""A real etcd as a child process: the embedded default, and what tests kill and freeze; finding and installing one.

etcd 3.5.0 to 3.5.2 lost acknowledged writes when killed under load (etcd issues 13766 and 14370, and its post-mortem
"v3.5 data inconsistency"); the last of those bugs was mended in 3.5.6. 3.4.23 lost none in 1.27 million.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from random import SystemRandom

from graphft.runtime.etcd.client import Etcd
from graphft.runtime.etcd.model import EtcdError, EtcdUnreachable, EtcdUsageError
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
    "--heartbeat-interval=10",
    "--election-timeout=50",
)
START_TIMEOUT, STOP_TIMEOUT = 60.0, 5.0  # seconds
POLL = 0.005
FIRST_PORT, LAST_PORT = 10_000, 32_767
PACKAGE = "etcd-server"
UNPACKED = Path("usr", "bin", "etcd")  # where Debian's package holds it
RULE = "graphft takes 3.4.21 and later 3.4, or 3.5.6 and later"
HELP = (
    "graphft etcd --install puts one into your cache; or install it (Debian: apt-get install etcd-server) and set "
    "ETCD_BIN to it; or pass the endpoints of one that runs"
)


# -- the program ------------------------------------------------------------------------------------------------------


def version_of(path: Path) -> str:
    """Returns the version of the etcd at this path; "" when it is none that works."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"etcd Version: (\d+\.\d+\.\d+)", done.stdout)
    return match[1] if match else ""


def trusted(version: str) -> bool:
    """True if this etcd keeps what it acknowledges."""
    numbers = tuple(map(int, version.split("."))) if version else ()
    return (3, 4, 21) <= numbers < (3, 5, 0) or numbers >= (3, 5, 6)


def find_etcd() -> Path:
    """Returns the first trusted etcd of $ETCD_BIN alone, or PATH, `.etcd/` of the checkout, the user's cache. Raises
    EtcdUsageError."""
    chosen, on_path = os.environ.get("ETCD_BIN"), shutil.which("etcd")
    places = [Path(on_path)] if on_path else []
    places = [Path(chosen)] if chosen else [*places, checkout_dir() / UNPACKED, cache_dir() / UNPACKED]
    versions = {path: version_of(path) for path in places}
    if found := next((path for path in places if trusted(versions[path])), None):
        return found
    bad = "".join(f"; {path} is {version}, which may lose data" for path, version in versions.items() if version)
    where = f"ETCD_BIN={chosen} is no usable etcd" if chosen else "no usable etcd was found"
    raise EtcdUsageError(f"{where}{bad}; {RULE}", rule="etcd-missing", help=HELP)


def checkout_dir() -> Path:
    """Returns `.etcd` beside the top-level folders of a checkout."""
    return Path(__file__).resolve().parents[2] / ".etcd"


def cache_dir() -> Path:
    """Returns the user's cache, for installations without a checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphft" / "etcd"


def install_etcd(dest: Path) -> Path:
    """Returns the etcd that is there; else unpacks Debian's or Ubuntu's package `etcd-server` into `dest`, without
    root. Raises EtcdUsageError when that fails; then `dest` is as it was."""
    try:
        return find_etcd()
    except EtcdError:
        if os.environ.get("ETCD_BIN"):
            raise
    with tempfile.TemporaryDirectory(prefix="graphft-etcd-") as scratch:
        new = Path(scratch, "new")
        _run(["dpkg", "-x", str(_download(Path(scratch))), str(new)], Path(scratch))
        version = version_of(new / UNPACKED)
        if not trusted(version):
            said = version or "it does not run here"
            raise EtcdUsageError(
                f"the distribution's etcd is of no use: {said}; {RULE}", rule="etcd-missing", help=HELP
            )
        shutil.copytree(new, dest, dirs_exist_ok=True)
    return dest.resolve() / UNPACKED


def _download(folder: Path) -> Path:
    """Returns the package, whose checksum apt compares with that in the distribution's signed list."""
    _run(["apt-get", "download", PACKAGE], folder)
    return next(folder.glob(f"{PACKAGE}_*.deb"))


def _run(command: list[str], folder: Path) -> None:
    """Raises `EtcdUsageError` with the command's last line when it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as e:
        said = str(e)
    else:
        if done.returncode == 0:
            return
        said = ((done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"])[-1]
    raise EtcdUsageError(
        f"{' '.join(command[:2])} failed: {said}", rule="etcd-missing", help=f"apt-get update may help; else {HELP}"
    )


# -- the server -------------------------------------------------------------------------------------------------------


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Returns ports of `host` that are free now, below those that the kernel gives to outgoing connections.

    A client that tries to reach a dead server on one of *those* can get connected to itself.
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


def _run_child(command: Sequence[str], log: Path, started: Future[subprocess.Popen[bytes]]) -> None:
    """Starts a program, its output appended to `log`, and waits for its end: the kernel takes the thread that starts it
    for its parent (`tied`). In a session of its own, Ctrl-C does not reach it."""
    try:
        with open(log, "ab") as out:
            started.set_result(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
            )
    except OSError as error:
        started.set_exception(EtcdError(f"{command[0]} does not start: {error}", rule="etcd-start"))
        return
    started.result().wait()


class EmbeddedEtcd:
    """A single etcd, with its data and its log (`etcd.log`) in `data_dir`. `start` it, or use `with`.

    A later `start`, of this object or of another with the same `data_dir`, finds the same data; this object keeps its
    port. The server dies with this process. Anybody who reaches `host` may read and write. `port` 0 picks a free one.
    """

    def __init__(
        self, data_dir: str | Path, *, host: str = HOST, port: int = 0, peer_port: int = 0, options: Sequence[str] = ()
    ) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.log = self.data_dir / "etcd.log"
        self.name = "graphft"
        self.host, self._port, self._peer_port, self.options = host, port, peer_port, tuple(options)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmbeddedEtcd:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoints(self) -> list[str]:
        """The endpoints for `Etcd(...)` and `--etcd`. Known from the first start on."""
        if not self._port:
            raise EtcdError("this etcd has no address before it is started", rule="etcd-start", help="call start()")
        return [f"[{self.host}]:{self._port}" if ":" in self.host else f"{self.host}:{self._port}"]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_data(self) -> bool:
        return (self.data_dir / "data" / "member").exists()

    def start(self, timeout: float = START_TIMEOUT) -> EmbeddedEtcd:
        """Starts it and returns when it answers. `EtcdError` with the end of its log when it does not."""
        try:
            self.launch()
            self.await_healthy(timeout)
        except EtcdError:
            self.kill()
            raise
        return self

    def launch(self) -> None:
        """Starts it without waiting."""
        if self.running:
            raise EtcdError(f"etcd at {self.endpoints[0]} runs already", rule="etcd-start", help="stop it first")
        self._port = self._port or free_ports(1, self.host)[0]
        self._peer_port = self._peer_port or free_ports(1)[0]
        self._check_ports()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        url, peers = f"http://{self.endpoints[0]}", f"http://{HOST}:{self._peer_port}"
        ours = (
            f"--name={self.name}",
            f"--data-dir={self.data_dir / 'data'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster={self.name}={peers}",
        )
        command = tied([str(find_etcd()), *OPTIONS, *ours, *self.options])  # the last of two counts
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=_run_child, args=(command, self.log, started), daemon=True).start()
        self._process = started.result()

    def await_healthy(self, timeout: float = START_TIMEOUT) -> None:
        """Returns when it answers through a majority. `EtcdError` when it has ended, or `timeout` has passed."""
        end = time.monotonic() + timeout
        with Etcd(self.endpoints) as client:
            while not self._answers(client):
                if not self.running:
                    raise self._failed("ended while it was starting")
                if time.monotonic() > end:
                    raise self._failed(f"did not answer within {timeout:.0f} s")
                time.sleep(POLL)

    def stop(self) -> None:
        """Ends it cleanly (SIGTERM), by force after 5 seconds. Does nothing when it does not run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> EmbeddedEtcd:
        """`kill` and `start`: same data, same port."""
        self.kill()
        return self.start()

    def _answers(self, client: Etcd) -> bool:
        try:  # faster than the channel, which pauses between its tries
            socket.create_connection((self.host, self._port)).close()
        except OSError:
            return False
        try:
            client.ping(deadline=0.5)
        except EtcdUnreachable:
            return False
        except EtcdError:  # it wants a login, which is an answer, too
            pass
        return True

    def _check_ports(self) -> None:
        for host, port in ((self.host, self._port), (HOST, self._peer_port)):
            if not port_free(port, host):
                raise EtcdError(
                    f"etcd cannot listen on {host}:{port}: the port is in use",
                    rule="port-busy",
                    help="stop the program that uses it (ss -ltnp shows which), or choose another port",
                )

    @property
    def full_disk(self) -> str:
        """Says that there is hardly any room left for its data, in which case it can write nothing, and answers
        nothing. Empty otherwise."""
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
