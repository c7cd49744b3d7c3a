"""One launcher at a time works in a job's folder, where it has files that it may delete or an etcd of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from graphft.errors import GraphftError, UsageError

_FILE = "launcher.lock"
LOOK_SECONDS = 0.1
PEEKS, PEEK_SECONDS = 10, 0.02
"""`holder_of` holds the lock for a moment when it looks."""
_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _let_go() -> None:
    """A child that user code forks would hold them for as long as it lives."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def locked(
    job_dir: Path, wait: Callable[[str], None] | None = None, file: str = _FILE, look: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Holds the folder, by a lock on this `file` in it. The kernel lets go when this process ends, however that
    happens. While another process holds it: raises GraphftError[job-running]; or, given `wait`, calls that with who it
    is, and waits for its end. `look` is called again and again meanwhile: an exception in it ends the waiting."""
    path = job_dir / file
    while True:
        job_dir.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except (IsADirectoryError, FileNotFoundError) as error:
            raise GraphftError(
                f"{path} is to be a file, to be locked: {error}", rule="job-directory", help="delete what is there"
            ) from None
        _held.add(descriptor)
        try:
            _lock(descriptor, job_dir, wait, look)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)  # its holder has deleted the folder: the lock is of a file that nobody else finds
    try:
        with contextlib.suppress(OSError):  # a full disk: it is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        _close(descriptor)


def _lock(descriptor: int, job_dir: Path, wait: Callable[[str], None] | None, look: Callable[[], None]) -> None:
    for _ in range(PEEKS):
        if _try_lock(descriptor, fcntl.LOCK_EX):
            return
        time.sleep(PEEK_SECONDS)
    holder = _text(descriptor)
    if wait is None:
        raise UsageError(
            f"the job in {job_dir} is being run by {holder}",
            rule="job-running",
            help=f"wait for its end, or stop it; `graphft status --job {job_dir}` shows where it is",
        )
    wait(holder)
    while not _try_lock(descriptor, fcntl.LOCK_EX):
        look()
        time.sleep(LOOK_SECONDS)


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close(descriptor: int) -> None:
    if descriptor in _held:  # else this is a child
        _held.remove(descriptor)
        os.close(descriptor)


def holder_of(job_dir: Path) -> str:
    """Returns "pid 12 on host a", the process that holds the folder now; "" if none does."""
    try:
        descriptor = os.open(job_dir / _FILE, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO, say, in its place
    except OSError:
        return ""
    try:
        return "" if _try_lock(descriptor, fcntl.LOCK_SH) else _text(descriptor)
    finally:
        os.close(descriptor)


def _text(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
