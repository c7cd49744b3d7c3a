"""The etcd program: finding it, versions that may be trusted with a job, installing it.

etcd 3.5.0 to 3.5.2 lost acknowledged writes when killed under load (etcd issues 13766 and 14370, and its post-mortem
"v3.5 data inconsistency"); the last of those bugs was mended in 3.5.6. 3.4.23 lost none in 1.27 million.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from graphft.runtime.etcd.errors import EtcdError, EtcdUsageError

Version = tuple[int, int, int]
RULE = "graphft takes 3.4.21 and later 3.4, or 3.5.6 and later"
HELP = (
    "graphft etcd --install puts one into your cache; or install it (Debian: apt-get install etcd-server) and set "
    "ETCD_BIN to it; or pass the endpoints of one that runs"
)
COMMAND_TIMEOUT = 120  # seconds; downloads included
PACKAGE = "etcd-server"
UNPACKED = Path("usr", "bin", "etcd")  # where Debian's package holds it


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    """An etcd program, its version, and options that it must be run with."""

    path: Path
    version: Version
    options: tuple[str, ...] = ()


def trusted(version: Version) -> bool:
    """True if this etcd keeps what it acknowledges."""
    return (3, 4, 21) <= version < (3, 5, 0) or version >= (3, 5, 6)


def version_of(path: Path) -> Version | None:
    """The version that the program reports; None when it is not a working etcd."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def find_etcd() -> EtcdBinary:
    """$ETCD_BIN, PATH, `.etcd/` of the checkout, the user's cache.

    An ETCD_BIN of an untrusted version is an error; elsewhere it is passed over. `EtcdError` when nothing is left.
    """
    chosen = os.environ.get("ETCD_BIN")
    if chosen:
        return _chosen(Path(chosen))
    seen = []
    on_path = shutil.which("etcd")
    for path in ([Path(on_path)] if on_path else []) + [folder / UNPACKED for folder in (checkout_dir(), cache_dir())]:
        version = version_of(path)
        if version is not None and trusted(version):
            return EtcdBinary(path, version)
        if version is not None:
            seen.append(f"{path} is {version_text(version)}, which may lose data")
    why = f" ({'; '.join(seen)})" if seen else ""
    raise EtcdUsageError(f"no usable etcd was found{why}; {RULE}", rule="etcd-missing", help=HELP)


def checkout_dir() -> Path:
    """`.etcd` beside the top-level folders of a checkout."""
    return Path(__file__).resolve().parents[2] / ".etcd"


def cache_dir() -> Path:
    """The user's cache, for installations without a checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphft" / "etcd"


def _chosen(path: Path) -> EtcdBinary:
    version = version_of(path)
    if version is None:
        raise EtcdUsageError(f"ETCD_BIN={path} is not a working etcd", rule="etcd-missing", help=HELP)
    if not trusted(version):
        raise EtcdUsageError(
            f"ETCD_BIN={path} is etcd {version_text(version)}, which may lose data; {RULE}",
            rule="etcd-version",
            help=HELP,
        )
    return EtcdBinary(path, version)


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


def provide_etcd(dest: Path) -> EtcdBinary:
    """The etcd that is there; else one is fetched into `dest`."""
    try:
        return find_etcd()
    except EtcdError:
        if os.environ.get("ETCD_BIN"):
            raise
    return fetch_etcd(dest)


def fetch_etcd(dest: Path) -> EtcdBinary:
    """Unpacks Debian's or Ubuntu's package `etcd-server` into `dest`, without root. `EtcdError` when that fails; then
    `dest` is as it was."""
    dest = Path(dest).resolve()
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise EtcdUsageError("etcd cannot be fetched: this machine has no apt-get", rule="etcd-missing", help=HELP)
    with tempfile.TemporaryDirectory(prefix="graphft-etcd-") as scratch:
        package = _download(Path(scratch))
        dest.mkdir(parents=True, exist_ok=True)
        _run(["dpkg", "-x", str(package), str(dest)], Path(scratch))
    path = dest / UNPACKED
    version = version_of(path)
    if version is None or not trusted(version):
        path.unlink(missing_ok=True)
        found = version_text(version) if version else "does not run here"
        raise EtcdUsageError(f"the distribution's etcd ({found}) is of no use; {RULE}", rule="etcd-version", help=HELP)
    return EtcdBinary(path, version)


def _download(folder: Path) -> Path:
    """The package, whose checksum apt compares with that in the distribution's signed list. apt's own list may be empty
    or old: on failure, once more with a list of our own."""
    try:
        _run(["apt-get", "download", PACKAGE], folder)
    except EtcdError:
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        private = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        _run(["apt-get", *private, "-o", "Debug::NoLocking=1", "update"], folder)
        _run(["apt-get", *private, "download", PACKAGE], folder)
    package = next(folder.glob(f"{PACKAGE}_*.deb"), None)
    if package is None:
        raise EtcdUsageError("etcd cannot be fetched: no package was downloaded", rule="etcd-missing", help=HELP)
    return package


def _run(command: list[str], folder: Path) -> None:
    """Raises `EtcdError` with what the command says when it fails."""
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=True)
    except subprocess.CalledProcessError as e:
        said = (e.stderr or e.stdout).strip().splitlines()
        raise EtcdUsageError(
            f"{' '.join(command[:2])} failed: {said[-1] if said else f'status {e.returncode}'}",
            rule="etcd-missing",
            help=HELP,
        ) from None
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EtcdUsageError(f"{' '.join(command[:2])} failed: {e}", rule="etcd-missing", help=HELP) from None
